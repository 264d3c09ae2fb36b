"""Draws one token for each row of logits by the Gumbel-max trick, without a sort or a softmax."""

from __future__ import annotations

import torch

from naiad_kernels.gumbel_argmax import reference

__all__ = ["gumbel_argmax"]


def gumbel_argmax(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    threshold: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Return the token with the largest scaled logit plus noise, among those at or above the threshold.

    A scaled logit is (logit − best) / temperature. The noise of a token depends on the row's key
    and the token id alone, so a row's draw does not depend on other rows.

    Args:
        logits: `[num_rows, vocab_size]` float32.
        best: `[num_rows]` float32, each row's largest logit, finite.
        temperature: `[num_rows]` float64, > 0.
        threshold: `[num_rows]` float64, ≤ 0; the smallest scaled logit that may be drawn; −inf = any.
        keys: `[num_rows]` int64.

    Returns:
        `[num_rows]` int64.
    """
    for each in (best, temperature, threshold, keys):
        assert each.shape == logits.shape[:1], (each.shape, logits.shape)
    assert logits.dtype == best.dtype == torch.float32, (logits.dtype, best.dtype)
    assert temperature.dtype == threshold.dtype == torch.float64, (temperature.dtype, threshold.dtype)
    if logits.device.type == "cuda":
        from naiad_kernels.gumbel_argmax import kernel

        return kernel.gumbel_argmax(logits, best, temperature, threshold, keys)
    return reference.gumbel_argmax(logits, best, temperature, threshold, keys)
