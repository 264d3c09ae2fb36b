"""The launches of sampling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from perf.compile_gate.served.shapes import NUM_TOKENS, ServedShape

from naiad_kernels.apply_bitmask import kernel as bitmask_kernel
from naiad_kernels.best_tokens import num_mask_words
from naiad_kernels.gumbel_argmax import kernel as gumbel_kernel
from naiad_kernels.kept_threshold import kernel as threshold_kernel


def sampling(shape: ServedShape) -> Callable[[], object]:
    """Drawing tokens; logits are float32 for every dtype of the model."""
    logits = torch.empty(NUM_TOKENS, shape.vocab_size)
    best = torch.empty(NUM_TOKENS)
    wide = torch.empty(NUM_TOKENS, dtype=torch.float64)
    whole = torch.empty(NUM_TOKENS, dtype=torch.int64)
    masks = torch.empty(NUM_TOKENS, num_mask_words(shape.vocab_size), dtype=torch.int32)

    def launch() -> None:
        threshold_kernel.kept_threshold(logits, best, wide, whole, wide, wide)
        gumbel_kernel.gumbel_argmax(logits, best, wide, wide, whole)
        bitmask_kernel.apply_bitmask(logits, whole, masks)

    return launch
