"""Verify draft tokens: the emitted tokens follow the target's law, whatever the drafts are."""

from __future__ import annotations

import torch

from naiad_kernels.rejection_sampling import reference
from naiad_kernels.rejection_sampling.rows import Drafts, TargetRows

__all__ = ["Drafts", "TargetRows", "rejection_sampling"]


def rejection_sampling(
    target: TargetRows, drafts: Drafts, row_start_loc: torch.Tensor, max_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts up to the first rejected one; then one recovered or bonus token.

    Drafts without a law, and greedy rows: the target's own token is drawn, by its own noise, and
    accepted drafts are those that equal it. So the output is what it would be without drafts.
    Drafts with a law: accepted with probability min(1, target / draft), else recovered from the
    part of the target that exceeds the draft. So the output's law is the target's.

    Args:
        target: rows of the sequences, one after the other; a sequence has one more than drafts.
        drafts: of the same rows.
        row_start_loc: `[num_seqs + 1]` int32, where each sequence's rows begin; a sequence without
            rows emits nothing, and rows after the last sequence's are ignored.
        max_drafts: K, at least the drafts of any sequence, ≥ 0.

    Returns:
        The accepted drafts of each sequence, `[num_seqs]` int64, and what it emits, `[num_seqs,
        K + 1]` int64: one token more than accepted, then −1.
    """
    num_rows = target.logits.shape[0]
    for each in (target.best, target.temperature, target.threshold, target.keys, drafts.token_ids):
        assert each.shape == (num_rows,), (each.shape, target.logits.shape)
    assert target.logits.dtype == target.best.dtype == torch.float32, target.logits.dtype
    assert target.temperature.dtype == target.threshold.dtype == torch.float64, target.temperature.dtype
    assert target.keys.dtype == drafts.token_ids.dtype == torch.int64, drafts.token_ids.dtype
    if drafts.probs is not None:
        assert drafts.probs.shape == target.logits.shape, (drafts.probs.shape, target.logits.shape)
        assert drafts.probs.dtype == torch.float32, drafts.probs.dtype
    assert row_start_loc.dtype == torch.int32, row_start_loc.dtype
    assert max_drafts >= 0, max_drafts
    if target.logits.device.type == "cuda":
        from naiad_kernels.rejection_sampling import kernel

        return kernel.rejection_sampling(target, drafts, row_start_loc, max_drafts)
    return reference.rejection_sampling(target, drafts, row_start_loc, max_drafts)
