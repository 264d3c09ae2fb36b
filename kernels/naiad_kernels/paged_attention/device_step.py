"""A step's sequences as a GPU reads them: three tensors, and sizes that launches are cut to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from naiad_kernels.paged_attention.layout import CacheLayout, tree_masks
from naiad_kernels.staging import Staging

# Query rows (tokens × heads of a KV head) up to which one program takes a whole sequence's, by
# bytes of an element; more float32 rows do not fit its registers.
_MAX_SHORT_ROWS = {2: 64, 4: 16}


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring sequences that are computed by the same launches.

    The numbers are upper bounds: what a sequence really has stands in the step's tensors, so one
    captured launch serves every step that fits.

    Attributes:
        first_seq: index of the first.
        num_seqs: sequences; one without query tokens is skipped.
        num_tokens: query tokens of all together.
        max_query_len: query tokens of one.
        max_seq_len: cached tokens of one.
        is_short: all query tokens of one sequence fit one program.
        has_trees: at least one has a tree.
    """

    first_seq: int
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    is_short: bool
    has_trees: bool


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step of S sequences.

    Attributes:
        block_tables: `[S, max_blocks]` int32; entries after a sequence's last block are not read.
        seq_lens: `[S]` int32, cached tokens including the step's own.
        query_start_loc: `[S + 1]` int32, where each sequence's query tokens begin.
        runs: cover the sequences in order.
        tree_masks: `[num_tokens]` int32, which tokens of its sequence's step each token may see;
            all bits where the sequence has no tree. None if none has.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    runs: tuple[Run, ...]
    tree_masks: torch.Tensor | None = None


def plan_device_step(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
    trees: Sequence[Sequence[int] | None] | None = None,
    staging: Staging | None = None,
) -> DeviceStep:
    """Arguments as for `plan_attention`; without `staging`, a copy of its own to the device."""
    counts = [layout.blocks_for(length) for length in seq_lens]
    width = max(counts)
    tables: list[int] = []
    for table, count in zip(block_tables, counts, strict=True):
        assert len(table) >= count, (table, count)
        tables += [*table[:count], *[0] * (width - count)]
    lists = [tables, list(seq_lens), list(itertools.accumulate(query_lens, initial=0))]
    if trees is not None:
        lists.append(tree_masks(query_lens, trees))
    sent = staging or Staging(Staging.bytes_for([], [len(each) for each in lists]), layout.device)
    parts = [sent.put(each, torch.int32) for each in lists]
    if staging is None:
        sent.send()
    return DeviceStep(
        block_tables=parts[0].view(len(counts), width),
        seq_lens=parts[1],
        query_start_loc=parts[2],
        runs=_runs(query_lens, seq_lens, layout, trees or [None] * len(counts)),
        tree_masks=parts[3] if trees is not None else None,
    )


def distinct_query_lens(layout: CacheLayout) -> list[int]:
    """Query tokens of a sequence, one number for each variant of the kernels that any number runs."""
    most_rows, group_size = _MAX_SHORT_ROWS[layout.dtype.itemsize], layout.group_size
    lens = {1, max(1, most_rows // group_size) + 1}
    rows = most_rows
    while rows >= group_size:
        lens.add(rows // group_size)
        rows //= 2
    return sorted(lens)


def _runs(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    layout: CacheLayout,
    trees: Sequence[Sequence[int] | None],
) -> tuple[Run, ...]:
    """One query token first, then the short ones that follow, then all the rest."""
    num_seqs = len(query_lens)
    singles = next((i for i, length in enumerate(query_lens) if length > 1), num_seqs)
    max_short_len = _MAX_SHORT_ROWS[layout.dtype.itemsize] // layout.group_size
    longs = next((i for i in range(singles, num_seqs) if query_lens[i] > max_short_len), num_seqs)
    borders = ((0, singles, True), (singles, longs, True), (longs, num_seqs, False))
    return tuple(
        Run(
            first_seq=first,
            num_seqs=end - first,
            num_tokens=sum(query_lens[first:end]),
            max_query_len=max(query_lens[first:end]),
            max_seq_len=max(seq_lens[first:end]),
            is_short=is_short,
            # One token is no tree: it takes the code of a step without trees.
            has_trees=first >= singles and any(tree is not None for tree in trees[first:end]),
        )
        for first, end, is_short in borders
        if first < end
    )
