"""Logits of prompt positions, for sequences that ask for them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from naiad.model_runner.step_inputs import StepRows
from naiad.sampling.sampler_output import float32_bytes


def context_logits(
    inputs: StepRows, hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, bytes]:
    """Those of the prompt positions that the step computed.

    Args:
        inputs: the step.
        hidden: [num_tokens, hidden_size], what the model made of it.
        compute_logits: [n, hidden_size] to [n, vocab_size].

    Returns:
        sequence_id → little-endian float32 [n, vocab_size] of the positions `start` … end of the
        step or of the prompt, for sequences that ask and have such positions in the step.
    """
    result = {}
    for end, (row, state) in zip(inputs.ends, inputs.rows, strict=True):
        sampling = state.sampling
        num_positions = min(row.num_scheduled_tokens, sampling.num_prompt_tokens - row.start)
        if sampling.params.returns_context_logits and num_positions > 0:
            first = end - row.num_scheduled_tokens
            logits = compute_logits(hidden[first : first + num_positions])
            result[row.sequence_id] = float32_bytes(logits)
    return result
