"""Draws one token for each row: temperature, top-k, top-p, min-p, then the Gumbel-max trick.

`draws_of` tells the native kernels how rows draw. Where torch computes on a CPU `draw` does it: it considers
a row's best tokens, and more only if the filters may keep more.
`draw_on_device` computes the same on a GPU, with kernels that read nothing back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from naiad.sampling.filters import Filters, threshold_among_best, top_p_now
from naiad.sampling.noise import gumbel_noise, stream_key
from naiad.sampling.row_state import RowState
from naiad.sequence import SamplingParams
from naiad_kernels.draw_tokens import Draws
from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.staging import Staging

# Number of best tokens considered first; the filters seldom keep more.
_MIN_CANDIDATES = 256
# The second attempt considers this many times more: it takes a quarter of the time of a full sort.
_MORE_CANDIDATES = 16
# Lists of 8-byte numbers that a draw needs for its rows.
_NUM_LISTS = 6
# Maximum number of logits whose noise is computed at once: bounds the memory and fits a CPU's cache.
_MAX_NOISE = 1 << 18
# Dividing by less would overflow; far above this value only the best token can be drawn.
MIN_TEMPERATURE = 1e-30
# More is infinite in float32; far below this value all tokens are equally likely.
MAX_TEMPERATURE = 1e38


def is_greedy(params: SamplingParams) -> bool:
    """Whether the best token is always taken, so that nothing is drawn."""
    return params.temperature == 0 or params.top_k == 1


def is_drawn(params: SamplingParams) -> bool:
    """Whether the token is drawn: neither the best one nor a beam's."""
    return not params.num_candidates and not is_greedy(params)


def draws_of(rows: Sequence[RowState], vocab_size: int) -> Draws | None:
    """How rows draw, for `naiad_kernels.draw_tokens` on a CPU.

    Args:
        rows: the state of each row.
        vocab_size: number of columns of the logits.

    Returns:
        The rows' parameters, with room for their tokens; None if no row draws.
    """
    params = [row.params for row in rows]
    are_drawn = [is_drawn(each) for each in params]
    if not any(are_drawn):
        return None
    temperatures = [_scale(each) if is_on else 0.0 for each, is_on in zip(params, are_drawn, strict=True)]
    filters = RowFilters(
        torch.tensor(temperatures, dtype=torch.float64),
        torch.tensor([min(each.top_k, vocab_size) for each in params]),
        torch.tensor([top_p_now(row) for row in rows], dtype=torch.float64),
        torch.tensor([each.min_p for each in params], dtype=torch.float64).log_(),
    )
    keys = torch.tensor([stream_key(row.noise, row.num_tokens) for row in rows])
    return Draws(filters, keys, torch.empty_like(keys))


def draw(logits: Tensor, best: Tensor, rows: Sequence[RowState], drawn: list[int], token_ids: Tensor) -> None:
    """Draw for some rows the token that maximises logit / temperature + noise.

    Args:
        logits: [num_rows, vocab_size] float32.
        best: [num_rows] float32, each row's greatest logit, finite for those in `drawn`.
        rows: the state of each row.
        drawn: indices of the rows to draw for.
        token_ids: [num_rows] int64; those of `drawn` are overwritten.
    """
    vocab_size = logits.shape[1]
    filtered = [index for index in drawn if is_filtered(rows[index].params)]
    fewest = max([_MIN_CANDIDATES, *(2 * rows[i].params.top_k for i in filtered)])
    # Rows that may keep more tokens than the candidates are drawn again with more candidates.
    for width in sorted({min(vocab_size, n) for n in (fewest, _MORE_CANDIDATES * fewest, vocab_size)}):
        undecided: list[int] = []
        for part in _parts(filtered, width):
            row = _Rows.of(rows, part, logits, best)
            chosen, is_decided = _draw_filtered(row, width)
            token_ids[row.indices] = chosen
            undecided += [index for index, ok in zip(part, is_decided, strict=True) if not ok]
        filtered = undecided
    free = [index for index in drawn if not is_filtered(rows[index].params)]
    for part in _parts(free, vocab_size):
        row = _Rows.of(rows, part, logits, best)
        token_ids[row.indices] = _draw_free(row)


def draw_on_device(
    logits: Tensor, best: Tensor, rows: Sequence[RowState], drawn: list[int], token_ids: Tensor
) -> None:
    """Draw for some rows the token that maximises logit / temperature + noise.

    Args:
        logits: [num_rows, vocab_size] float32.
        best: [num_rows] float32, each row's greatest logit; if it is not finite, the id is arbitrary.
        rows: the state of each row.
        drawn: indices of the rows to draw for.
        token_ids: [num_rows] int64; those of `drawn` are overwritten.
    """
    chosen = [rows[index] for index in drawn]
    params = [row.params for row in chosen]
    staging = Staging(Staging.bytes_for([len(drawn)] * _NUM_LISTS, []), logits.device)
    index = staging.put(drawn, torch.int64)
    keys = [stream_key(row.noise, row.num_tokens) for row in chosen]
    key_tensor = staging.put(keys, torch.int64)
    scales = [_scale(each) for each in params]
    temperature = staging.put(scales, torch.float64)
    top_k = staging.put([min(each.top_k, logits.shape[1]) for each in params], torch.int64)
    top_p = staging.put([top_p_now(row) for row in chosen], torch.float64)
    min_p = staging.put([each.min_p for each in params], torch.float64)
    staging.send()
    if len(drawn) < len(rows):
        logits, best = logits.index_select(0, index), best.index_select(0, index)
    if any(is_filtered(each) for each in params):
        threshold = kept_threshold(logits, best, RowFilters(temperature, top_k, top_p, min_p.log()))
    else:
        threshold = torch.full_like(temperature, float("-inf"))
    token_ids.index_copy_(0, index, gumbel_argmax(logits, best, temperature, threshold, key_tensor))


def _scale(params: SamplingParams) -> float:
    return min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def _parts(indices: list[int], width: int) -> list[list[int]]:
    size = max(1, _MAX_NOISE // width)
    return [indices[start : start + size] for start in range(0, len(indices), size)]


@dataclass(slots=True, frozen=True)
class _Rows:
    """Some rows of the batch: `logits` is [n, vocab_size], the other tensors [n, 1] or [n]."""

    indices: Tensor
    logits: Tensor
    best: Tensor
    temperature: Tensor
    keys: Tensor
    filters: Filters

    @classmethod
    def of(cls, rows: Sequence[RowState], indices: list[int], logits: Tensor, best: Tensor) -> _Rows:
        """Gather the rows `indices` and their parameters."""
        device = logits.device
        chosen = [rows[index] for index in indices]
        keys = [stream_key(row.noise, row.num_tokens) for row in chosen]
        index = torch.tensor(indices, device=device)
        scales = [row.params.temperature for row in chosen]
        temperature = torch.tensor(scales, dtype=torch.float64, device=device)
        return cls(
            indices=index,
            logits=logits[index],
            best=best[index].unsqueeze(1),
            temperature=temperature.clamp_(MIN_TEMPERATURE, MAX_TEMPERATURE).unsqueeze(1),
            keys=torch.tensor(keys, device=device).unsqueeze(1),
            filters=Filters.of(chosen, logits.shape[1], device),
        )

    def scaled(self, logits: Tensor) -> Tensor:
        """(logits − the row's best) / temperature: float64, ≤ 0."""
        return (logits.to(torch.float64) - self.best).div_(self.temperature)

    def total_mass(self) -> Tensor:
        """The sum of exp(scaled logit) over the vocabulary, [n] float64.

        The summands are float32 for speed; their sum is float64, so that the order of summation, which
        depends on the batch size, does not show.
        """
        scaled = (self.logits - self.best).div_(self.temperature.to(torch.float32))
        return scaled.exp_().sum(1, dtype=torch.float64)


def _draw_filtered(rows: _Rows, width: int) -> tuple[Tensor, list[bool]]:
    """Draw among the best `width` tokens; also return for which rows the result is final."""
    vocab_size = rows.logits.shape[1]
    if width < vocab_size:
        best_logits, token_ids = rows.logits.topk(width, dim=1)
    else:
        best_logits, token_ids = rows.logits.sort(dim=1, descending=True)
    values = rows.scaled(best_logits)
    total_mass = rows.total_mass() if rows.filters.need_total_mass else torch.zeros_like(values[:, 0])
    threshold, is_final = threshold_among_best(values, rows.filters, total_mass)
    scores = values + gumbel_noise(rows.keys, token_ids)
    scores.masked_fill_(values < threshold, float("-inf"))
    chosen = token_ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
    return chosen, (is_final | (width == vocab_size)).tolist()


def _draw_free(rows: _Rows) -> Tensor:
    """Draw among all tokens."""
    token_ids = torch.arange(rows.logits.shape[1], device=rows.logits.device)
    return gumbel_noise(rows.keys, token_ids).add_(rows.scaled(rows.logits)).argmax(dim=1)


def is_filtered(params: SamplingParams) -> bool:
    """Whether a filter may exclude tokens."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.top_p_decay is not None
