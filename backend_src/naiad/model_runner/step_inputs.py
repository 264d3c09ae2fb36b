"""One step's tensors, built from the scheduler's lists."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from naiad.models import ForwardBatch
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad_kernels.paged_attention import attention_sort_key, plan_attention
from naiad_kernels.paged_attention.device_step import list_sizes
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.staging import Staging
from naiad_kernels.store_kv import Slots


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which rows of the model's result belong to whom.

    Attributes:
        rows: the step's sequences in the order of their tokens.
        ends: index of each sequence's last token, plus one.
        sampled_places: [n] int64 on the device: the tokens that somebody samples behind, in order.
    """

    rows: list[ScheduledSequence]
    ends: list[int]
    sampled_places: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of some rows, one row after the other.

    Attributes:
        token_ids, positions: of each token.
        slots: block × block_size + offset of each.
        ends: of each row, as in `StepRows`.
        query_lens, seq_lens: of each row: its tokens, and the cached ones with them.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    ends: list[int]
    query_lens: list[int]
    seq_lens: list[int]

    @classmethod
    def of(cls, rows: Sequence[ScheduledSequence], block_size: int) -> StepTokens:
        """Every token's block must be in its sequence's `block_table` already."""
        tokens = cls([], [], [], [], [], [])
        for row in rows:
            end = row.start + row.num_scheduled_tokens
            table = row.sequence.block_table
            tokens.token_ids.extend(row.sequence.token_ids[row.start : end])
            tokens.token_ids.extend(row.draft_token_ids)
            tokens.positions.extend(range(row.start, end))
            tokens.slots.extend(
                [
                    table[position // block_size] * block_size + position % block_size
                    for position in range(row.start, end)
                ]
            )
            tokens.ends.append(len(tokens.token_ids))
            tokens.query_lens.append(row.num_scheduled_tokens)
            tokens.seq_lens.append(end)
        assert len(tokens.token_ids) == sum(tokens.query_lens), "a step schedules tokens that are not known"
        return tokens


def build_step_inputs(output: SchedulerOutput, layout: CacheLayout) -> tuple[ForwardBatch, StepRows]:
    """Order the sequences as attention wants them and flatten their tokens.

    Every token's block must be in its sequence's `block_table` already.
    """
    rows = sorted(
        output.scheduled,
        key=lambda row: attention_sort_key(row.num_scheduled_tokens, row.start + row.num_scheduled_tokens),
    )
    tokens = StepTokens.of(rows, layout.block_size)
    places = sampled_places(rows, tokens.ends)
    tables = [row.sequence.block_table for row in rows]
    staging = _staging_for(tokens, len(places), layout) if is_staged(layout) else None
    put = _on_host if staging is None else staging.put
    slots = put(tokens.slots, torch.int64)
    token_ids, positions = put(tokens.token_ids, torch.int64), put(tokens.positions, torch.int64)
    place_tensor = put(places, torch.int64)
    attention = plan_attention(tokens.query_lens, tokens.seq_lens, tables, layout, staging=staging)
    if staging is not None:
        staging.send()
    batch = ForwardBatch(token_ids, positions, Slots.from_slot_mapping(slots, layout.block_size), attention)
    return batch, StepRows(rows, tokens.ends, place_tensor)


def is_staged(layout: CacheLayout) -> bool:
    """Whether tensors go to another memory, so that one copy is better than several."""
    return layout.device.type == "cuda"


def sampled_places(
    rows: Sequence[ScheduledSequence], ends: Sequence[int], failed: Container[int] = ()
) -> list[int]:
    """Of each row that samples the last known token and the drafts, as indices of the step's tokens.

    Args:
        rows: of the step.
        ends: of the rows, as in `StepRows`.
        failed: sequence ids that are left out.
    """
    return [
        place
        for row, end in zip(rows, ends, strict=True)
        if row.samples and row.sequence.sequence_id not in failed
        for place in range(end - 1 - len(row.draft_token_ids), end)
    ]


def _staging_for(tokens: StepTokens, num_places: int, layout: CacheLayout) -> Staging:
    num_tokens = len(tokens.token_ids)
    sizes = list_sizes(tokens.query_lens, tokens.seq_lens, layout)
    num_bytes = Staging.bytes_for([num_tokens, num_tokens, num_tokens, num_places], sizes)
    return Staging(num_bytes, layout.device)


def _on_host(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)
