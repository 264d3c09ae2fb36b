"""One step's tensors, built from the scheduler's lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad.models import ForwardBatch
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad_kernels.paged_attention import attention_sort_key, plan_attention
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.store_kv import Slots


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model reads, and which rows of its result belong to whom.

    Attributes:
        rows: the step's sequences in the order of their tokens.
        ends: index of each sequence's last token, plus one.
    """

    batch: ForwardBatch
    rows: list[ScheduledSequence]
    ends: list[int]


def build_step_inputs(output: SchedulerOutput, layout: CacheLayout) -> StepInputs:
    """Order the sequences as attention wants them and flatten their tokens.

    Every token's block must be in its sequence's `block_table` already.
    """
    rows = sorted(
        output.scheduled,
        key=lambda row: attention_sort_key(row.num_scheduled_tokens, row.start + row.num_scheduled_tokens),
    )
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    block_size = layout.block_size
    for row in rows:
        end = row.start + row.num_scheduled_tokens
        table = row.sequence.block_table
        token_ids += row.sequence.token_ids[row.start : end]
        token_ids += row.draft_token_ids
        positions += range(row.start, end)
        slots += [
            table[position // block_size] * block_size + position % block_size
            for position in range(row.start, end)
        ]
        ends.append(len(token_ids))
    assert len(token_ids) == output.num_scheduled_tokens, "a step schedules tokens that are not known"
    device = layout.device
    attention = plan_attention(
        [row.num_scheduled_tokens for row in rows],
        [row.start + row.num_scheduled_tokens for row in rows],
        [row.sequence.block_table for row in rows],
        layout,
    )
    batch = ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=Slots.from_slot_mapping(torch.tensor(slots, dtype=torch.int64, device=device), block_size),
        attention=attention,
    )
    return StepInputs(batch=batch, rows=rows, ends=ends)
