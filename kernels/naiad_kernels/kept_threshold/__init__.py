"""Top-k, top-p and min-p as one threshold for each row, without a sort."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.kept_threshold import reference

__all__ = ["RowFilters", "kept_threshold"]


@dataclass(frozen=True, slots=True)
class RowFilters:
    """The filters of each row; all tensors are `[num_rows]`.

    Attributes:
        temperature: float64, > 0.
        top_k: int64, 0 = off, at most the size of the vocabulary.
        top_p: float64, > 0, ≥ 1 = off; applies to the tokens that top-k keeps.
        log_min_p: float64, logarithm of the smallest probability relative to the best; −inf = off.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor


def kept_threshold(logits: torch.Tensor, best: torch.Tensor, filters: RowFilters) -> torch.Tensor:
    """Return the smallest scaled logit that each row keeps; ties with the last kept token are kept.

    A scaled logit is (logit − best) / temperature.

    Args:
        logits: `[num_rows, vocab_size]` float32, no NaN.
        best: `[num_rows]` float32, each row's largest logit, finite.
        filters: the rows' filters.

    Returns:
        `[num_rows]` float64, −inf for a row that keeps all tokens; equals a scaled logit of the row or
        its log_min_p otherwise.
    """
    for each in (best, filters.temperature, filters.top_k, filters.top_p, filters.log_min_p):
        assert each.shape == logits.shape[:1], (each.shape, logits.shape)
    assert logits.dtype == best.dtype == torch.float32, (logits.dtype, best.dtype)
    arguments = (logits, best, filters.temperature, filters.top_k, filters.top_p, filters.log_min_p)
    if logits.device.type == "cuda":
        from naiad_kernels.kept_threshold import kernel

        return kernel.kept_threshold(*arguments)
    return reference.kept_threshold(*arguments)
