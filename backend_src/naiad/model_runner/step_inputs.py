"""One step's tensors, built from the scheduler's lists."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which rows of the model's result belong to whom.

    Attributes:
        rows: the step's rows in the order of their tokens.
        ends: index of each row's last token, plus one.
        sampled_places: [n] int64 on the device: the tokens after which a new one is sampled, in order.
    """

    rows: list[StateRow]
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
        slots: for each group of layers, of each token; see `slots_of`.
        ends: of each row, as in `StepRows`.
        query_lens, seq_lens: of each row: its tokens, and the cached ones with them.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[list[int]]
    ends: list[int]
    query_lens: list[int]
    seq_lens: list[int]

    @property
    def has_unknown(self) -> bool:
        """Whether the last step has sampled some of them."""
        return min(self.token_ids) < 0

    @classmethod
    def of(
        cls, rows: Sequence[StateRow], layouts: Sequence[CacheLayout], sampled: SampledIds | None = None
    ) -> StepTokens:
        """Flatten the rows.

        Args:
            rows: every token's block is in its sequence's block tables.
            layouts: of the cache, one for each group of layers.
            sampled: by the last step, if ids may be unknown.
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
            for slots, table in zip(tokens.slots, state.block_tables, strict=True):
                slots.extend(slots_of(table, start, end, block_size))
            tokens.ends.append(len(tokens.token_ids))
            tokens.query_lens.append(end - start)
            tokens.seq_lens.append(end)
        return tokens


def build_step_inputs(
    step_rows: Sequence[StateRow], layouts: Sequence[CacheLayout], sampled: SampledIds | None = None
) -> tuple[ForwardBatch, StepRows]:
    """Order the rows as attention wants them and flatten their tokens.

    Args:
        step_rows: every token's block is in its sequence's block tables.
        layouts: of the cache, one for each group of layers; they differ in their windows.
        sampled: by the last step, if ids may be unknown.
    """
    rows = sorted(step_rows, key=lambda each: attention_sort_key(each.row.num_scheduled_tokens, each.row.end))
    tokens = StepTokens.of(rows, layouts, sampled)
    places = sampled_places(rows, tokens.ends)
    staging = _staging_for(tokens, len(places), layouts) if is_staged(layouts[0]) else None
    put = _on_host if staging is None else staging.put
    slot_mappings = [put(slots, torch.int64) for slots in tokens.slots]
    token_ids, positions = put(tokens.token_ids, torch.int64), put(tokens.positions, torch.int64)
    place_tensor = put(places, torch.int64)
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
    groups = [
        GroupInputs(Slots.from_slot_mapping(slots, layouts[0].block_size), plan)
        for slots, plan in zip(slot_mappings, plans, strict=True)
    ]
    batch = ForwardBatch(token_ids, positions, groups)
    return batch, StepRows(rows, tokens.ends, place_tensor)


def is_staged(layout: CacheLayout) -> bool:
    """Whether tensors go to another memory, so that one copy is better than several."""
    return layout.device.type == "cuda"


def sampled_places(rows: Sequence[StateRow], ends: Sequence[int]) -> list[int]:
    """Of each row that samples the last known token and the drafts, as indices of the step's tokens.

    Args:
        rows: of the step.
        ends: of the rows, as in `StepRows`.
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
    return torch.tensor(values, dtype=dtype)
