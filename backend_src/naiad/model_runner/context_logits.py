"""Logits of prompt positions, for sequences that ask for them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from naiad.model_runner.step_inputs import StepRows
from naiad.sampling.sampler_output import float32_bytes

_MAX_ROWS = 64


def context_logits(
    inputs: StepRows, hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, bytes]:
    """Compute the logits of the prompt positions in a step.

    Args:
        inputs: the step's rows.
        hidden: [num_tokens, hidden_size], the model's result.
        compute_logits: maps [n, hidden_size] to [n, vocab_size].

    Returns:
        sequence_id → little-endian float32 [n, vocab_size] of the row's prompt positions, for sequences
        that ask for context logits and have such positions in the step.
    """
    result = {}
    for end, (row, state) in zip(inputs.ends, inputs.rows, strict=True):
        sampling = state.sampling
        if not sampling.params.returns_context_logits:
            continue
        num_positions = min(row.num_scheduled_tokens, sampling.num_prompt_tokens - row.start)
        if num_positions > 0:
            first = end - row.num_scheduled_tokens
            # In parts: all logits of a long prompt would be the largest tensor of the process.
            stop = first + num_positions
            parts = [hidden[at : min(stop, at + _MAX_ROWS)] for at in range(first, stop, _MAX_ROWS)]
            result[row.sequence_id] = b"".join(float32_bytes(compute_logits(part)) for part in parts)
    return result
