"""What the drawing of tokens launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from naiad_kernels.compile_gate.served.shapes import NUM_TOKENS, ServedShape
from naiad_kernels.gumbel_argmax import kernel as gumbel_kernel
from naiad_kernels.kept_threshold import kernel as threshold_kernel
from naiad_kernels.rejection_sampling import Drafts, TargetRows
from naiad_kernels.rejection_sampling import kernel as rejection_kernel
from naiad_kernels.top_log_probs import kernel as log_probs_kernel


def sampling(shape: ServedShape) -> Callable[[], object]:
    """Logits are float32 whatever the model's dtype."""
    logits = torch.empty(NUM_TOKENS, shape.vocab_size)
    best = torch.empty(NUM_TOKENS)
    wide = torch.empty(NUM_TOKENS, dtype=torch.float64)
    whole = torch.empty(NUM_TOKENS, dtype=torch.int64)
    target = TargetRows(logits, best, wide, wide, whole)
    starts = torch.zeros(2, dtype=torch.int32)

    def launch() -> None:
        threshold_kernel.kept_threshold(logits, best, wide, whole, wide, wide)
        gumbel_kernel.gumbel_argmax(logits, best, wide, wide, whole)
        for probs in (None, logits):
            rejection_kernel.rejection_sampling(target, Drafts(whole, probs), starts, 5)
        for num_top in (0, 20, 64):
            log_probs_kernel.top_log_probs(logits, whole, num_top)

    return launch
