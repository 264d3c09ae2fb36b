"""The index tensors and masks of one step's attention, built once and shared by all layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from naiad_kernels.native.tables import NativeTables
from naiad_kernels.paged_attention.chunks import ChunkGroup, plan_chunks
from naiad_kernels.paged_attention.device_step import DeviceStep, plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.paged_attention.single import SingleGroup, plan_single
from naiad_kernels.staging import Staging

# Sequences with the same padded sizes are computed together. Below these sizes padding is cheaper than
# the ops of another group.
_MIN_QUERY_BUCKET = 16
_MIN_CONTEXT_BUCKET = 512


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a step's sequences are grouped.

    Attributes:
        num_tokens: number of tokens in the step.
        singles: groups of sequences with one query token; they come first in the step.
        chunks: groups of sequences with several query tokens.
        device_step: used on a CUDA device instead of groups.
        tables: used by the native kernels instead of groups.
    """

    num_tokens: int
    singles: list[SingleGroup]
    chunks: list[ChunkGroup]
    device_step: DeviceStep | None = None
    tables: NativeTables | None = None


def attention_sort_key(query_len: int, seq_len: int) -> tuple[int, int]:
    """The key by which sequences are sorted to form the fewest groups, single tokens first."""
    query_bucket = 1 if query_len == 1 else _bucket(query_len, _MIN_QUERY_BUCKET)
    return query_bucket, _bucket(seq_len, _MIN_CONTEXT_BUCKET)


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
    staging: Staging | None = None,
) -> AttentionPlan:
    """Group a step's sequences and build the index tensors of each group.

    Sequences should be sorted by `attention_sort_key`; those with one token must come first.

    Args:
        query_lens: tokens of each sequence in this step, ≥ 1; they are the last of its cached tokens.
        seq_lens: cached tokens of each sequence including this step's.
        block_tables: each sequence's block ids, enough for its `seq_len`; further ids are ignored, and so
            are blocks entirely before the window of the sequence's first token in this step.
        layout: shapes of the cache and the query.
        staging: on a CUDA device, the buffer that copies the plan there; None: it copies by itself.
    """
    assert list(query_lens) == sorted(query_lens, key=lambda length: length > 1), query_lens
    if layout.is_native:
        return AttentionPlan(sum(query_lens), [], [], tables=NativeTables.of(query_lens, block_tables))
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
