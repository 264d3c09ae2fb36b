"""Draws one token for each row of logits: temperature, top-k, top-p and min-p, then the Gumbel-max trick."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.apply_bitmask import apply_bitmask
from naiad_kernels.best_tokens import BestTokens
from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.recording import recordable

__all__ = ["Draws", "draw_tokens"]


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row draws, and the tokens drawn.

    Attributes:
        filters: temperature and filters of each row. A temperature of 0 takes the best token; others are
            within 1e-30 and 1e38.
        keys: `[num_rows]` int64, of the noise; see `gumbel_argmax`.
        token_ids: `[num_rows]` int64, written: the token drawn; arbitrary for a row whose best logit is not
            finite.
    """

    filters: RowFilters
    keys: torch.Tensor
    token_ids: torch.Tensor


@recordable
def draw_tokens(
    logits: torch.Tensor, best: BestTokens, draws: Draws, allowed: torch.Tensor | None = None
) -> None:
    """Draw a token for each row; the plain form is what recorded steps are compared with.

    In a recording it comes after `best_tokens` of the same rows, and the tape's caller gives `best`, `draws`
    and the mask with each step.

    Args:
        logits: `[num_rows, vocab_size]` float32.
        best: of these logits, among the tokens that are allowed.
        draws: how; its `token_ids` are overwritten.
        allowed: the bitmask of `best_tokens`; None: all tokens are allowed.
    """
    if allowed is not None:
        logits = logits.clone()
        apply_bitmask(logits, range(len(logits)), allowed)
    filters = draws.filters
    is_drawn = filters.temperature > 0
    temperature = filters.temperature.where(is_drawn, 1.0)
    on = RowFilters(temperature, filters.top_k, filters.top_p, filters.log_min_p)
    threshold = kept_threshold(logits, best.logits, on)
    drawn = gumbel_argmax(logits, best.logits, temperature, threshold, draws.keys)
    draws.token_ids.copy_(drawn.where(is_drawn, best.token_ids))
