"""Top-k, top-p and min-p as one threshold per row.

A token is kept if its logit is not below the threshold. So tokens that tie with the last one
kept are kept too, and the kept set depends on the row's logits alone, however a sort orders ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from naiad.sampling.row_state import RowState, TokenState
from naiad.sequence import SamplingParams


@dataclass(slots=True, frozen=True)
class Filters:
    """The filters of some rows.

    Attributes:
        top_k: [num_rows] int64, 0 = off, at most the size of the vocabulary.
        top_p: [num_rows] float64, 1 = off.
        log_min_p: [num_rows] float64, the logarithm of min_p; -inf = off.
        need_total_mass: whether any row has top-p without top-k.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    need_total_mass: bool

    @classmethod
    def of(cls, rows: Sequence[RowState], vocab_size: int, device: torch.device) -> Filters:
        """Gather the filters of each row."""
        params, top_p = [row.params for row in rows], [top_p_now(row) for row in rows]
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
        return cls(
            top_k=torch.tensor([min(p.top_k, vocab_size) for p in params], device=device),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            log_min_p=min_p.log_(),
            need_total_mass=any(p.top_k == 0 and each < 1 for p, each in zip(params, top_p, strict=True)),
        )


class TopPReset:
    """The `Stateful` feature that tracks when an id of the output last reset top-p; see `TopPDecay`."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether the parameters have a reset id."""
        return params.top_p_decay is not None and params.top_p_decay.reset_id >= 0

    def new_state(self, params: SamplingParams) -> TokenState:
        """Return a counter of the output tokens since the reset id."""
        assert params.top_p_decay is not None
        return _TokensAfterReset(params.top_p_decay.reset_id)


TOP_P_RESET = TopPReset()


class _TokensAfterReset:
    """Counts the output tokens since the last reset id, or all of them if there was none."""

    __slots__ = ("_reset_id", "num_tokens")

    def __init__(self, reset_id: int, num_tokens: int = 0) -> None:
        self._reset_id = reset_id
        self.num_tokens = num_tokens

    def advance(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        if not is_prompt:
            for token_id in token_ids:
                self.num_tokens = 0 if token_id == self._reset_id else self.num_tokens + 1

    def clone(self) -> _TokensAfterReset:
        return _TokensAfterReset(self._reset_id, self.num_tokens)


def top_p_now(row: RowState) -> float:
    """The top-p for the row's next token; see `TopPDecay`."""
    decay = row.params.top_p_decay
    if decay is None:
        return row.params.top_p
    num_steps = row.num_output_tokens
    if decay.reset_id >= 0:
        num_steps = cast(_TokensAfterReset, row.states[TOP_P_RESET]).num_tokens
    decayed = max(row.params.top_p * decay.factor**num_steps, decay.minimum)
    return decayed if num_steps else row.params.top_p


def threshold_among_best(values: Tensor, filters: Filters, total_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the smallest value that each row keeps.

    Top-p applies to the tokens that top-k keeps. Min-p compares with the best token, which both keep,
    so its order relative to them does not matter.

    Args:
        values: [num_rows, width] float64, descending: the row's best scaled logits, less its
            greatest one (so the first is 0); `width` is at least every top-k.
        filters: the rows' filters.
        total_mass: [num_rows] float64: the sum of exp(value) over the row's whole vocabulary;
            used where top-p is on and top-k is off.

    Returns:
        The thresholds, [num_rows, 1] float64, and whether each is final for the whole row, [num_rows]
        bool: no token beyond `values` could be kept or change the threshold.
    """
    last = values[:, -1:]
    has_top_k = (filters.top_k > 0).unsqueeze(1)
    has_top_p = (filters.top_p < 1).unsqueeze(1)
    kth = values.gather(1, (filters.top_k - 1).clamp(min=0).unsqueeze(1))
    by_top_k = torch.where(has_top_k, kth, last)
    masses = values.exp().masked_fill_(values < by_top_k, 0)
    cumulated = masses.cumsum(1)
    total = torch.where(has_top_k, cumulated[:, -1:], total_mass.unsqueeze(1))
    # A token is needed if the better ones do not reach the mass; the best one always is.
    needed = cumulated - masses < filters.top_p.unsqueeze(1) * total
    last_needed = (needed.sum(1, keepdim=True) - 1).clamp(min=0)
    by_top_p = torch.where(has_top_p, values.gather(1, last_needed), last)
    threshold = torch.maximum(torch.maximum(by_top_k, by_top_p), filters.log_min_p.unsqueeze(1))
    # Ties with the k-th token may continue beyond `values`; then top-p's total lacks their mass.
    knows_total = ~(has_top_k & has_top_p) | (kth > last)
    # After an impossible token (-inf) all others are impossible too.
    is_final = ((threshold > last) & knows_total) | last.isneginf()
    return threshold, is_final.squeeze(1)
