"""One step's tensors, built from the scheduler's lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from naiad.models import ForwardBatch, GroupInputs
from naiad.outputs import ScheduledSequence, SchedulerOutput
from naiad.sequence import UNKNOWN_TOKEN
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
class SampledIds:
    """What the last step has sampled: on the device, and perhaps not yet on the host.

    Attributes:
        sequence_ids: of each row that sampled.
        token_ids: [num_rows] int64.
        vocab_size: ids are below; what a row that fails has sampled may be anything.
    """

    sequence_ids: Sequence[int]
    token_ids: torch.Tensor
    vocab_size: int

    def places(self) -> dict[int, int]:
        """Sequence id → its row."""
        return {sequence_id: place for place, sequence_id in enumerate(self.sequence_ids)}

    def fill(self, token_ids: torch.Tensor) -> None:
        """Overwrite those of a step's ids that say in which row they are: −1 − row."""
        rows = (-1 - token_ids).clamp_min_(0)
        sampled = self.token_ids.index_select(0, rows).clamp_(0, self.vocab_size - 1)
        token_ids.copy_(torch.where(token_ids < 0, sampled, token_ids))


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of some rows, one row after the other.

    Attributes:
        token_ids: of each token; −1 − row where the last step has sampled it (see `SampledIds`).
        positions: of each token.
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

    @property
    def has_unknown(self) -> bool:
        """Whether the last step has sampled some of them."""
        return min(self.token_ids) < 0

    @classmethod
    def of(
        cls, rows: Sequence[ScheduledSequence], block_size: int, sampled: SampledIds | None = None
    ) -> StepTokens:
        """Flatten the rows.

        Args:
            rows: every token's block must be in its sequence's `block_table` already.
            block_size: tokens in a block.
            sampled: by the last step, if ids may be unknown.
        """
        tokens = cls([], [], [], [], [], [])
        places: Mapping[int, int] = {}
        for row in rows:
            end = row.start + row.num_scheduled_tokens
            table = row.sequence.block_table
            tokens.token_ids.extend(row.sequence.token_ids[row.start : end])
            if tokens.token_ids[-1] == UNKNOWN_TOKEN:
                assert sampled is not None, "a token is neither known nor sampled"
                places = places or sampled.places()
                tokens.token_ids[-1] = -1 - places[row.sequence.sequence_id]
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


def build_step_inputs(
    output: SchedulerOutput, layouts: Sequence[CacheLayout], sampled: SampledIds | None = None
) -> tuple[ForwardBatch, StepRows]:
    """Order the sequences as attention wants them and flatten their tokens.

    Args:
        output: every token's block must be in its sequence's `block_table` already.
        layouts: of the cache, one for each group of layers; they differ in their windows.
        sampled: by the last step, if ids may be unknown.
    """
    layout = layouts[0]
    rows = sorted(
        output.scheduled,
        key=lambda row: attention_sort_key(row.num_scheduled_tokens, row.start + row.num_scheduled_tokens),
    )
    tokens = StepTokens.of(rows, layout.block_size, sampled)
    places = sampled_places(rows, tokens.ends)
    tables = [row.sequence.block_table for row in rows]
    staging = _staging_for(tokens, len(places), layouts) if is_staged(layout) else None
    put = _on_host if staging is None else staging.put
    slot_mapping = put(tokens.slots, torch.int64)
    token_ids, positions = put(tokens.token_ids, torch.int64), put(tokens.positions, torch.int64)
    place_tensor = put(places, torch.int64)
    plans = [
        plan_attention(tokens.query_lens, tokens.seq_lens, tables, each, staging=staging) for each in layouts
    ]
    if staging is not None:
        staging.send()
    if sampled is not None and tokens.has_unknown:
        sampled.fill(token_ids)
    # One block table serves all groups.
    slots = Slots.from_slot_mapping(slot_mapping, layout.block_size)
    batch = ForwardBatch(token_ids, positions, [GroupInputs(slots, plan) for plan in plans])
    return batch, StepRows(rows, tokens.ends, place_tensor)


def is_staged(layout: CacheLayout) -> bool:
    """Whether tensors go to another memory, so that one copy is better than several."""
    return layout.device.type == "cuda"


def sampled_places(rows: Sequence[ScheduledSequence], ends: Sequence[int]) -> list[int]:
    """Of each row that samples the last known token and the drafts, as indices of the step's tokens.

    Args:
        rows: of the step.
        ends: of the rows, as in `StepRows`.
    """
    return [
        place
        for row, end in zip(rows, ends, strict=True)
        if row.samples
        for place in range(end - 1 - len(row.draft_token_ids), end)
    ]


def _staging_for(tokens: StepTokens, num_places: int, layouts: Sequence[CacheLayout]) -> Staging:
    num_tokens = len(tokens.token_ids)
    sizes = [size for each in layouts for size in list_sizes(tokens.query_lens, tokens.seq_lens, each)]
    num_bytes = Staging.bytes_for([num_tokens, num_tokens, num_tokens, num_places], sizes)
    return Staging(num_bytes, layouts[0].device)


def _on_host(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)
