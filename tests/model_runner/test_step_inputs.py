from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from naiad.model_runner import step_inputs
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.model_runner.sequence_states import SequenceStates, StateRow
from naiad.model_runner.step_inputs import StepRows, build_step_inputs
from naiad.models import ForwardBatch
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.paged_attention import AttentionPlan
from naiad_kernels.paged_attention.device_step import plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.staging import Staging

LAYOUT = CacheLayout(6, 2, 10, 16, torch.float32, torch.device("cpu"))


def row(sequence_id: int, start: int, num_known: int, drafts: tuple[int, ...] = ()) -> LoneRow:
    """A row from `start` to the last known token, and drafts; blocks 10 × id, 10 × id + 1, …."""
    return LoneRow(
        sequence_id,
        list(range(num_known)),
        start,
        [10 * sequence_id + n for n in range(5)],
        SamplingParams(max_tokens=1),
        draft_token_ids=drafts,
    )


ROWS = [row(1, 0, 20), row(2, 33, 34), replace(row(3, 4, 5), samples=False), row(4, 15, 16, (90, 91))]


def state_rows() -> list[StateRow]:
    return SequenceStates(Sampler(100)).take(lone_step(ROWS))


def test_tokens_positions_and_slots_of_a_step() -> None:
    batch, inputs = build_step_inputs(state_rows(), [LAYOUT])
    assert [each.row.sequence_id for each in inputs.rows] == [2, 3, 4, 1]
    assert inputs.ends == [1, 2, 5, 25]
    assert batch.token_ids.tolist() == [33, 4, 15, 90, 91, *range(20)]
    assert batch.positions.tolist() == [33, 4, 15, 16, 17, *range(20)]
    assert batch.groups[0].slots.blocks.tolist() == [22, 30, 40, 41, 41, *[10] * 16, *[11] * 4]
    assert batch.groups[0].slots.offsets.tolist() == [1, 4, 15, 0, 1, *range(16), *range(4)]
    assert inputs.sampled_places is not None
    assert inputs.sampled_places.tolist() == [0, 2, 3, 4, 24]


def test_a_gpu_gets_the_same_numbers_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Staging] = []
    send = Staging.send

    def plan(query_lens, seq_lens, tables, layout, staging):  # type: ignore[no-untyped-def]
        step = plan_device_step(query_lens, seq_lens, tables, layout, staging=staging)
        return AttentionPlan(sum(query_lens), [], [], step)

    plain = build_step_inputs(state_rows(), [LAYOUT])
    monkeypatch.setattr(step_inputs, "plan_attention", plan)
    monkeypatch.setattr(step_inputs, "_on_host", None)
    monkeypatch.setattr(step_inputs, "is_staged", lambda layout: True)
    monkeypatch.setattr(Staging, "send", lambda self: (sent.append(self), send(self))[1])
    staged = build_step_inputs(state_rows(), [LAYOUT])
    assert len(sent) == 1
    assert numbers(staged) == numbers(plain)
    step = staged[0].groups[0].attention.device_step
    assert step is not None
    assert step.seq_lens.tolist() == [34, 5, 18, 20]
    assert step.query_start_loc.tolist() == [0, 1, 2, 5, 25]
    assert step.block_tables.tolist() == [[20, 21, 22], [30, 0, 0], [40, 41, 0], [10, 11, 0]]


def numbers(step: tuple[ForwardBatch, StepRows]) -> list[list[int]]:
    batch, inputs = step
    assert inputs.sampled_places is not None
    tensors = (batch.token_ids, batch.positions, batch.groups[0].slots.blocks, batch.groups[0].slots.offsets)
    return [tensor.tolist() for tensor in (*tensors, inputs.sampled_places)]
