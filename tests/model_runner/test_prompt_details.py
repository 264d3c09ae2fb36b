from __future__ import annotations

import torch

from naiad.model_runner.prompt_details import prompt_details
from naiad.model_runner.sequence_states import SequenceState, StateRow
from naiad.model_runner.step_inputs import StepRows
from naiad.outputs import StepRow
from naiad.sampling.row_state import new_row
from naiad.sequence import SamplingParams

VOCABULARY = 11


def rows_of(*rows: tuple[StepRow, int, SamplingParams]) -> StepRows:
    """Rows with the lengths of their prompts and their parameters."""
    state_rows, ends, end = [], [], 0
    for row, num_prompt_tokens, params in rows:
        state = SequenceState(new_row((), row.sequence_id, params, num_prompt_tokens), [0])
        state_rows.append(StateRow(row, state))
        end += row.num_scheduled_tokens
        ends.append(end)
    return StepRows(state_rows, ends, torch.empty(0, dtype=torch.int64))


def asking(num_best: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=1, num_prompt_log_probs=num_best)


def test_each_token_is_scored_by_the_position_before_it() -> None:
    inputs = rows_of(
        (StepRow(1, 4, [1, 2, 3], False, next_token_id=4), 20, asking(2)),
        (StepRow(2, 0, [7, 8], True), 2, SamplingParams(max_tokens=1)),
        # The whole prompt, and tokens that are known after it, as after a preemption; then drafts.
        (StepRow(3, 0, [5, 6, 9, 9], True, (1, 2)), 2, asking(0)),
        (StepRow(4, 9, [3], True), 10, asking(0)),
    )
    logits = torch.randn(inputs.ends[-1], VOCABULARY)
    details = prompt_details(inputs, torch.arange(inputs.ends[-1]), lambda places: logits[places])
    assert (details.errors, details.context_logits) == ({}, {})
    assert list(details.log_probs) == [1, 3]
    table = logits.log_softmax(1)
    found = details.log_probs[1]
    assert [each.log_prob for each in found] == table[[0, 1, 2], [2, 3, 4]].tolist()
    assert [each.top_token_ids for each in found] == logits[:3].topk(2).indices.tolist()
    assert [each.log_prob for each in details.log_probs[3]] == [table[5, 6].item()]
    assert details.log_probs[3][0].top_token_ids == []


def test_a_prompt_whose_log_probs_are_not_finite_fails_alone() -> None:
    inputs = rows_of(
        (StepRow(1, 0, [1, 2, 3], True), 3, asking()),
        (StepRow(2, 0, [1, 2, 3], True), 3, asking()),
    )
    logits = torch.randn(6, VOCABULARY)
    logits[1, 5] = torch.inf
    details = prompt_details(inputs, torch.arange(6), lambda places: logits[places])
    assert list(details.errors) == [1]
    assert list(details.log_probs) == [2]


def test_few_logits_of_a_long_prompt_exist_at_once() -> None:
    ids = [n % VOCABULARY for n in range(300)]
    inputs = rows_of((StepRow(1, 0, ids, True), 300, asking(1)))
    logits = torch.randn(300, VOCABULARY)
    sizes = []

    def compute(places: torch.Tensor) -> torch.Tensor:
        sizes.append(len(places))
        return logits[places]

    details = prompt_details(inputs, torch.arange(300), compute)
    assert sizes == [64, 64, 64, 64, 43]
    assert [each.log_prob for each in details.log_probs[1]] == (
        logits.log_softmax(1)[range(299), ids[1:]].tolist()
    )
