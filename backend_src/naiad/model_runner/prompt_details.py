"""Logits and log-probabilities of prompt positions, for sequences that ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from naiad.errors import InternalError, NaiadError
from naiad.model_runner.step_inputs import StepRows
from naiad.outputs import StepRow, TokenLogProbs
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler_output import NOT_FINITE, float32_bytes, max_log_prob_rows, token_log_probs
from naiad.sequence import UNKNOWN_TOKEN

_MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptDetails:
    """What the sequences of a step asked for of their prompts' positions in it.

    Attributes:
        context_logits, log_probs: as in `ModelOutput`.
        errors: sequence_id → the reason why its log-probabilities cannot be reported.
    """

    context_logits: dict[int, bytes] = field(default_factory=dict)
    log_probs: dict[int, list[TokenLogProbs]] = field(default_factory=dict)
    errors: dict[int, NaiadError] = field(default_factory=dict)


def prompt_details(
    inputs: StepRows, hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> PromptDetails:
    """Compute what is requested of the prompt positions in a step.

    Args:
        inputs: the step's rows.
        hidden: [num_tokens, hidden_size], the model's result.
        compute_logits: maps [n, hidden_size] to [n, vocab_size] float32, for at most 64 rows at a time.
    """
    details = PromptDetails()
    for end, (row, state) in zip(inputs.ends, inputs.rows, strict=True):
        if state.sampling.params.describes_prompt:
            first = end - row.num_scheduled_tokens
            _add_row(details, row, state.sampling, hidden[first:end], compute_logits)
    return details


def _add_row(
    details: PromptDetails,
    row: StepRow,
    state: RowState,
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    params = state.params
    num_positions = min(len(row.token_ids), state.num_prompt_tokens - row.start)
    following = _following_ids(row, state.num_prompt_tokens) if params.num_prompt_log_probs >= 0 else []
    if not params.returns_context_logits:
        num_positions = len(following)
    context: list[bytes] = []
    log_probs: list[TokenLogProbs] = []
    # In parts: all logits of a long prompt would be the largest tensor of the process.
    for start in range(0, num_positions, _MAX_ROWS):
        logits = compute_logits(hidden[start : min(num_positions, start + _MAX_ROWS)])
        if params.returns_context_logits:
            context.append(float32_bytes(logits))
        log_probs += _log_probs(logits, following[start : start + _MAX_ROWS], params.num_prompt_log_probs)
    if context:
        details.context_logits[row.sequence_id] = b"".join(context)
    if not all(math.isfinite(each.log_prob) for each in log_probs):
        details.errors[row.sequence_id] = InternalError(NOT_FINITE)
    elif log_probs:
        details.log_probs[row.sequence_id] = log_probs


def _following_ids(row: StepRow, num_prompt_tokens: int) -> list[int]:
    """The prompt tokens that follow the row's tokens, each its own."""
    following = [*row.token_ids[1:], row.next_token_id][: max(0, num_prompt_tokens - 1 - row.start)]
    assert UNKNOWN_TOKEN not in following, "a prompt token is not known"
    return following


def _log_probs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogProbs]:
    """The log-probabilities of these tokens, which follow the first rows of the logits."""
    # On a GPU a part of any size takes about as long.
    size = max_log_prob_rows(logits) if logits.device.type == "cpu" else _MAX_ROWS
    return [
        each
        for start in range(0, len(token_ids), size)
        for each in token_log_probs(
            logits[start : min(len(token_ids), start + size)], token_ids[start : start + size], num_top
        )
    ]
