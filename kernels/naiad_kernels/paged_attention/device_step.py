"""A step's sequences for a GPU: three tensors, and the sizes of the launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from naiad_kernels.paged_attention.layout import MIN_SPLIT, CacheLayout
from naiad_kernels.staging import Staging

# By bytes per element: the most query rows (tokens × heads of a KV head) of a sequence that one program
# computes; more float32 rows do not fit its registers.
_MAX_SHORT_ROWS = {2: 64, 4: 16}


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring sequences that are computed by the same launches.

    The numbers are upper bounds; the actual lengths are in the step's tensors, so one captured launch
    serves every step that fits.

    Attributes:
        first_seq: index of the first sequence.
        num_seqs: number of sequences; those without query tokens are skipped.
        num_tokens: query tokens of all sequences together.
        max_query_len: query tokens of one sequence.
        max_seq_len: cached tokens of one sequence.
        is_short: all query tokens of one sequence fit one program.
        min_split: minimum number of keys in a split of a short sequence's context.
        is_fixed: a token's result must not depend on the other tokens of its program.
    """

    first_seq: int
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    is_short: bool
    min_split: int = MIN_SPLIT
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step of S sequences.

    Attributes:
        block_tables: `[S, max_blocks]` int32; entries after a sequence's last block are not read, nor are
            those of blocks entirely before its window.
        seq_lens: `[S]` int32, cached tokens including the step's own.
        query_start_loc: `[S + 1]` int32, where each sequence's query tokens begin.
        runs: cover the sequences in order.
        window: 0, or how many tokens each token attends to at most, itself included.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    runs: tuple[Run, ...]
    window: int = 0


def plan_device_step(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
    staging: Staging | None = None,
) -> DeviceStep:
    """Plan a step; the arguments are those of `plan_attention`. Without `staging` it copies by itself."""
    if layout.fixed_split:
        query_lens, seq_lens, block_tables = _pieces(query_lens, seq_lens, block_tables, layout)
    counts = [layout.blocks_for(length) for length in seq_lens]
    shape = (len(counts), max(counts))
    lists = [list(seq_lens), list(itertools.accumulate(query_lens, initial=0))]
    sizes = [shape[0] * shape[1], *(len(each) for each in lists)]
    sent = staging or Staging(Staging.bytes_for([], sizes), layout.device)
    tables = sent.put_table(block_tables, counts, shape)
    parts = [sent.put(each, torch.int32) for each in lists]
    if staging is None:
        sent.send()
    return DeviceStep(
        block_tables=tables,
        seq_lens=parts[0],
        query_start_loc=parts[1],
        runs=_runs(query_lens, seq_lens, layout),
        window=layout.window,
    )


def list_sizes(query_lens: Sequence[int], seq_lens: Sequence[int], layout: CacheLayout) -> list[int]:
    """The lengths of the int32 lists that `plan_device_step` puts into the staging buffer."""
    num_lines = len(query_lens)
    if layout.fixed_split:
        size = max_short_len(layout)
        num_lines = sum(-(-length // size) for length in query_lens)
    return [num_lines * layout.blocks_for(max(seq_lens)), num_lines, num_lines + 1]


def padded_run(layout: CacheLayout, num_seqs: int, query_len: int, seq_len: int) -> Run:
    """A run with these upper bounds; `query_len` is at most `max_short_len`."""
    assert query_len <= max_short_len(layout), (query_len, layout)
    num_tokens = num_seqs * query_len
    if layout.fixed_split:
        return _fixed_run(layout, num_seqs, num_tokens, seq_len)
    return Run(
        first_seq=0,
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        max_query_len=query_len,
        max_seq_len=seq_len,
        is_short=True,
    )


def _fixed_run(layout: CacheLayout, num_seqs: int, num_tokens: int, seq_len: int) -> Run:
    """A run whose programs are always compiled for the most tokens that they can compute."""
    return Run(
        first_seq=0,
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        max_query_len=max_short_len(layout),
        max_seq_len=seq_len,
        is_short=True,
        min_split=layout.fixed_split,
        is_fixed=True,
    )


def _pieces(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
) -> tuple[list[int], list[int], list[Sequence[int]]]:
    """Divide sequences into pieces for one program each; a piece is a sequence that ends with it."""
    size = max_short_len(layout)
    lens: list[int] = []
    ends: list[int] = []
    tables: list[Sequence[int]] = []
    for query_len, seq_len, table in zip(query_lens, seq_lens, block_tables, strict=True):
        for begin in range(0, query_len, size):
            lens.append(min(size, query_len - begin))
            ends.append(seq_len - query_len + begin + lens[-1])
            tables.append(table)
    return lens, ends, tables


def plan_padded_step(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
    run: Run,
    staging: Staging,
) -> DeviceStep:
    """Plan a step whose launches have the sizes of `run`; sequences may be in any order.

    Args:
        query_lens: the query tokens of each sequence; further sequences of `run` have none.
        seq_lens: as for `plan_attention`.
        block_tables: as for `plan_attention`.
        layout: as for `plan_attention`.
        run: from `padded_run`.
        staging: copies the step to the device.
    """
    counts = [layout.blocks_for(length) for length in seq_lens]
    num_empty = run.num_seqs - len(seq_lens)
    starts = list(itertools.accumulate([*query_lens, *[0] * num_empty], initial=0))
    return DeviceStep(
        block_tables=staging.put_table(
            block_tables, counts, (run.num_seqs, layout.blocks_for(run.max_seq_len))
        ),
        seq_lens=staging.put([*seq_lens, *[0] * num_empty], torch.int32),
        query_start_loc=staging.put(starts, torch.int32),
        runs=(run,),
        window=layout.window,
    )


def distinct_query_lens(layout: CacheLayout) -> list[int]:
    """Numbers of query tokens that together run every kernel variant."""
    if layout.fixed_split:
        return [1]
    most_rows, group_size = _MAX_SHORT_ROWS[layout.dtype.itemsize], layout.group_size
    lens = {1, max_short_len(layout) + 1}
    rows = most_rows
    while rows >= group_size:
        lens.add(rows // group_size)
        rows //= 2
    return sorted(lens)


def max_short_len(layout: CacheLayout) -> int:
    """The most query tokens of a sequence that one program computes; at least one."""
    return max(1, _MAX_SHORT_ROWS[layout.dtype.itemsize] // layout.group_size)


def _runs(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    layout: CacheLayout,
) -> tuple[Run, ...]:
    """Runs of sequences with one query token, with few, and with many, in this order."""
    if layout.fixed_split:
        return (_fixed_run(layout, len(query_lens), sum(query_lens), max(seq_lens)),)
    num_seqs = len(query_lens)
    singles = next((i for i, length in enumerate(query_lens) if length > 1), num_seqs)
    most = max_short_len(layout)
    longs = next((i for i in range(singles, num_seqs) if query_lens[i] > most), num_seqs)
    borders = ((0, singles, True), (singles, longs, True), (longs, num_seqs, False))
    return tuple(
        Run(
            first_seq=first,
            num_seqs=end - first,
            num_tokens=sum(query_lens[first:end]),
            max_query_len=max(query_lens[first:end]),
            max_seq_len=max(seq_lens[first:end]),
            is_short=is_short,
        )
        for first, end, is_short in borders
        if first < end
    )
