"""The index tensors and masks of one step's attention, built once and shared by all layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from naiad_kernels.paged_attention.chunks import ChunkGroup, plan_chunks
from naiad_kernels.paged_attention.device_step import DeviceStep, plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.paged_attention.single import SingleGroup, plan_single
from naiad_kernels.staging import Staging

# Sequences whose padded sizes agree are computed together. Below these sizes padding is cheaper
# than another group's ops.
_MIN_QUERY_BUCKET = 16
_MIN_CONTEXT_BUCKET = 512


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a step's sequences are grouped.

    Attributes:
        num_tokens: of the step.
        singles: groups of sequences with one query token; they come first in the step.
        chunks: groups of sequences with several.
        device_step: for a CUDA device, instead of groups.
    """

    num_tokens: int
    singles: list[SingleGroup]
    chunks: list[ChunkGroup]
    device_step: DeviceStep | None = None


def attention_sort_key(query_len: int, seq_len: int) -> tuple[int, int]:
    """Sequences sorted by this key form the fewest groups, single tokens first."""
    query_bucket = 1 if query_len == 1 else _bucket(query_len, _MIN_QUERY_BUCKET)
    return query_bucket, _bucket(seq_len, _MIN_CONTEXT_BUCKET)


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
    staging: Staging | None = None,
) -> AttentionPlan:
    """Group a step's sequences and build what each group needs.

    Args:
        query_lens: tokens of each sequence in this step, ≥ 1; the last tokens of its `seq_len`.
        seq_lens: cached tokens of each sequence including this step's.
        block_tables: each sequence's block ids, enough for its `seq_len`; more are ignored, and so are
            blocks that lie wholly before the window of the sequence's first token in this step.
        layout: shapes of the cache and the query.
        staging: for a CUDA device, what takes the plan there; None: a copy of its own does.

    Sequences should be sorted by `attention_sort_key`; those with one token must come first.
    """
    assert list(query_lens) == sorted(query_lens, key=lambda length: length > 1), query_lens
    keys = [
        attention_sort_key(query_len, seq_len - layout.first_visible(query_len, seq_len))
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
    ]
    if layout.device.type == "cuda":
        step = plan_device_step(query_lens, seq_lens, block_tables, layout, staging)
        return AttentionPlan(num_tokens=sum(query_lens), singles=[], chunks=[], device_step=step)
    plan = AttentionPlan(num_tokens=sum(query_lens), singles=[], chunks=[])
    token = 0
    for (query_bucket, _), members in itertools.groupby(range(len(keys)), key=keys.__getitem__):
        rows = list(members)
        lens = [query_lens[row] for row in rows]
        contexts = [seq_lens[row] for row in rows]
        tables = [block_tables[row] for row in rows]
        tokens = slice(token, token + sum(lens))
        if query_bucket == 1:
            plan.singles.append(plan_single(tokens, contexts, tables, layout))
        else:
            plan.chunks.append(plan_chunks(tokens, lens, contexts, tables, layout))
        token = tokens.stop
    return plan


def _bucket(size: int, smallest: int) -> int:
    return max(smallest, 1 << (size - 1).bit_length())
