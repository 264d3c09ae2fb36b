"""Log-probabilities of a chosen token and of the best ones, without a sort of the vocabulary."""

from __future__ import annotations

import torch

from naiad_kernels.top_log_probs import reference

__all__ = ["MAX_TOP", "top_log_probs"]

MAX_TOP = 64


def top_log_probs(
    logits: torch.Tensor, chosen_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural logarithms of each row's softmax.

    Args:
        logits: `[num_rows, vocab_size]` float32, no NaN or +inf, at least one finite in each row.
        chosen_ids: `[num_rows]` int64, in [0, vocab_size).
        num_top: N, from 0 to MAX_TOP and at most the size of the vocabulary.

    Returns:
        Those of the chosen tokens, `[num_rows]` float32; the ids of the N best tokens of each row,
        `[num_rows, N]` int64, best first and the lower id first of equal ones; and their
        logarithms, `[num_rows, N]` float32, −inf for impossible tokens.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert chosen_ids.shape == logits.shape[:1], (chosen_ids.shape, logits.shape)
    assert chosen_ids.dtype == torch.int64, chosen_ids.dtype
    assert 0 <= num_top <= min(MAX_TOP, logits.shape[1]), (num_top, logits.shape)
    if logits.device.type == "cuda":
        from naiad_kernels.top_log_probs import kernel

        return kernel.top_log_probs(logits, chosen_ids, num_top)
    return reference.top_log_probs(logits, chosen_ids, num_top)
