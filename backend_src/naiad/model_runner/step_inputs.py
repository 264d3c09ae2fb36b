"""Builds a step's tensors from the rows' lists."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from naiad.kv_cache.slots import slots_of
from naiad.model_runner.sequence_states import StateRow
from naiad.models import ForwardBatch, GroupInputs
from naiad.sequence import UNKNOWN_TOKEN
from naiad_kernels.paged_attention import attention_sort_key, plan_attention
from naiad_kernels.paged_attention.device_step import list_sizes
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.staging import Staging
from naiad_kernels.store_kv import Slots

# Native kernels find a token's slot in the block table.
_NO_SLOTS = Slots(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The step's rows, and where their tokens are in the model's result.

    Attributes:
        rows: the step's rows in the order of their tokens.
        ends: for each row, the index after its last token.
        sampled_places: [n] int64 on the device: indices of the tokens after which one is sampled; None if
            that is after each, or after none.
    """

    rows: list[StateRow]
    ends: list[int]
    sampled_places: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SampledIds:
    """The ids that the last step sampled; they are on the device, and perhaps not yet on the host.

    Attributes:
        sequence_ids: the sequence of each row that sampled.
        token_ids: [num_rows] int64, arbitrary for rows that failed.
        vocab_size: ids are clamped to [0, vocab_size).
    """

    sequence_ids: Sequence[int]
    token_ids: torch.Tensor
    vocab_size: int

    def places(self) -> dict[int, int]:
        """Map sequence ids to rows."""
        return {sequence_id: place for place, sequence_id in enumerate(self.sequence_ids)}

    def fill(self, token_ids: torch.Tensor) -> None:
        """Replace each id of the form −1 − row by the id that this row sampled, in place."""
        rows = (-1 - token_ids).clamp_min_(0)
        sampled = self.token_ids.index_select(0, rows).clamp_(0, self.vocab_size - 1)
        token_ids.copy_(torch.where(token_ids < 0, sampled, token_ids))


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of some rows, one row after the other.

    Attributes:
        token_ids: each token's id; −1 − row where the last step samples it (see `SampledIds`).
        positions: each token's position.
        slots: for each group of layers, each token's slot; see `slots_of`. Empty for native kernels, which
            find it in the block table.
        ends: for each row, the index after its last token.
        query_lens, seq_lens: for each row, its number of tokens, and that plus the cached ones before.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[list[int]]
    ends: list[int]
    query_lens: list[int]
    seq_lens: list[int]

    @property
    def has_unknown(self) -> bool:
        """Whether some ids have to be filled in from the last step's samples."""
        return min(self.token_ids) < 0

    @classmethod
    def of(
        cls, rows: Sequence[StateRow], layouts: Sequence[CacheLayout], sampled: SampledIds | None = None
    ) -> StepTokens:
        """Flatten the rows.

        Args:
            rows: the rows; every token's block is in its sequence's block tables.
            layouts: the cache's layouts, one for each group of layers.
            sampled: the ids that the last step sampled, if some ids of this one may be unknown.
        """
        tokens = cls([], [], [[] for _ in layouts], [], [], [])
        block_size = layouts[0].block_size
        places: Mapping[int, int] = {}
        for row, state in rows:
            start, end = row.start, row.end
            tokens.token_ids.extend(row.token_ids)
            if row.token_ids[-1] == UNKNOWN_TOKEN:
                assert sampled is not None, "a token is neither known nor sampled"
                places = places or sampled.places()
                tokens.token_ids[-1] = -1 - places[row.sequence_id]
            tokens.token_ids.extend(row.draft_token_ids)
            tokens.positions.extend(range(start, end))
            if not layouts[0].is_native:
                for slots, table in zip(tokens.slots, state.block_tables, strict=True):
                    slots.extend(slots_of(table, start, end, block_size))
            tokens.ends.append(len(tokens.token_ids))
            tokens.query_lens.append(end - start)
            tokens.seq_lens.append(end)
        return tokens


def build_step_inputs(
    step_rows: Sequence[StateRow], layouts: Sequence[CacheLayout], sampled: SampledIds | None = None
) -> tuple[ForwardBatch, StepRows]:
    """Sort the rows as attention requires, and build the step's tensors.

    Args:
        step_rows: the rows; every token's block is in its sequence's block tables.
        layouts: the cache's layouts, one for each group of layers; they differ in their windows.
        sampled: the ids that the last step sampled, if some ids of this one may be unknown.
    """
    rows = sorted(step_rows, key=lambda each: attention_sort_key(each.row.num_scheduled_tokens, each.row.end))
    tokens = StepTokens.of(rows, layouts, sampled)
    places = sampled_places(rows, tokens.ends)
    if len(places) == len(tokens.token_ids):
        places = []
    staging = _staging_for(tokens, len(places), layouts) if is_staged(layouts[0]) else None
    put = _on_host if staging is None else staging.put
    is_native = layouts[0].is_native
    slot_mappings = [] if is_native else [put(slots, torch.int64) for slots in tokens.slots]
    token_ids, positions = put(tokens.token_ids, torch.int64), put(tokens.positions, torch.int64)
    place_tensor = put(places, torch.int64) if places else None
    plans = [
        plan_attention(
            tokens.query_lens,
            tokens.seq_lens,
            [state.block_tables[group] for _, state in rows],
            layout,
            staging=staging,
        )
        for group, layout in enumerate(layouts)
    ]
    if staging is not None:
        staging.send()
    if sampled is not None and tokens.has_unknown:
        sampled.fill(token_ids)
    slots = [Slots.from_slot_mapping(each, layouts[0].block_size) for each in slot_mappings]
    if is_native:
        slots = [_NO_SLOTS] * len(layouts)
    groups = [GroupInputs(*each) for each in zip(slots, plans, strict=True)]
    batch = ForwardBatch(token_ids, positions, groups)
    return batch, StepRows(rows, tokens.ends, place_tensor)


def is_staged(layout: CacheLayout) -> bool:
    """Whether tensors are copied to a device, so that one copy is better than several."""
    return layout.device.type == "cuda"


def sampled_places(rows: Sequence[StateRow], ends: Sequence[int]) -> list[int]:
    """Indices, among the step's tokens, of the last known token and the drafts of each row that samples.

    Args:
        rows: the step's rows.
        ends: for each row, the index after its last token.
    """
    return [
        place
        for (row, _), end in zip(rows, ends, strict=True)
        if row.samples
        for place in range(end - 1 - len(row.draft_token_ids), end)
    ]


def _staging_for(tokens: StepTokens, num_places: int, layouts: Sequence[CacheLayout]) -> Staging:
    num_tokens = len(tokens.token_ids)
    sizes = [size for each in layouts for size in list_sizes(tokens.query_lens, tokens.seq_lens, each)]
    wide = [num_tokens] * (2 + len(layouts))
    num_bytes = Staging.bytes_for([*wide, num_places], sizes)
    return Staging(num_bytes, layouts[0].device)


def _on_host(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    assert dtype == torch.int64, dtype
    # `torch.tensor` takes twice as long for a short list.
    return torch.frombuffer(array("q", values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
