from __future__ import annotations

import pytest
import torch

from naiad_kernels.paged_attention.device_step import (
    DeviceStep,
    distinct_query_lens,
    list_sizes,
    padded_run,
    plan_device_step,
)
from naiad_kernels.paged_attention.layout import CacheLayout, fixed_split_for


def plan(steps: list[tuple[int, int]], group_size: int = 4, dtype: torch.dtype = torch.float16) -> DeviceStep:
    layout = CacheLayout(2 * group_size, 2, 8, 16, dtype, torch.device("cpu"))
    tables = [list(range(10 * i, 10 * i + 10)) for i in range(len(steps))]
    return plan_device_step([q for q, _ in steps], [s for _, s in steps], tables, layout)


def runs(step: DeviceStep) -> list[tuple[int, int, int, bool]]:
    return [(run.first_seq, run.num_seqs, run.max_query_len, run.is_short) for run in step.runs]


def test_tensors_describe_the_step() -> None:
    step = plan([(1, 17), (1, 3), (20, 40)])
    assert step.seq_lens.tolist() == [17, 3, 40]
    assert step.query_start_loc.tolist() == [0, 1, 2, 22]
    assert step.block_tables.tolist() == [[0, 1, 0], [10, 0, 0], [20, 21, 22]]
    assert {part.dtype for part in (step.seq_lens, step.query_start_loc, step.block_tables)} == {torch.int32}


def test_every_tensor_is_aligned_for_any_number_of_sequences() -> None:
    for num_seqs in range(1, 9):
        step = plan([(1, 17)] * num_seqs)
        for part in (step.seq_lens, step.query_start_loc, step.block_tables):
            assert part.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(1, 5)], [(0, 1, 1, True)]),
        ([(16, 16)], [(0, 1, 16, True)]),
        ([(17, 17)], [(0, 1, 17, False)]),
        (
            [(1, 9), (1, 2), (3, 9), (16, 16), (30, 30)],
            [(0, 2, 1, True), (2, 2, 16, True), (4, 1, 30, False)],
        ),
        ([(1, 9), (30, 30), (2, 9), (40, 40)], [(0, 1, 1, True), (1, 3, 40, False)]),
    ],
)
def test_sequences_form_runs(
    steps: list[tuple[int, int]], expected: list[tuple[int, int, int, bool]]
) -> None:
    assert runs(plan(steps)) == expected


def test_fewer_float32_rows_fit_a_program() -> None:
    assert runs(plan([(5, 9)], dtype=torch.float32)) == [(0, 1, 5, False)]


def test_one_token_of_very_many_heads_is_short() -> None:
    assert runs(plan([(1, 9), (2, 9)], group_size=71)) == [(0, 1, 1, True), (1, 1, 2, False)]


def test_bounds_cover_the_run() -> None:
    run = plan([(2, 30), (3, 9)]).runs[0]
    assert (run.num_tokens, run.max_seq_len) == (5, 30)


def test_a_fixed_order_cuts_sequences_into_pieces_of_one_run() -> None:
    layout = CacheLayout(8, 2, 8, 16, torch.float16, torch.device("cpu"), fixed_split=512)
    tables = [list(range(10 * i, 10 * i + 10)) for i in range(3)]
    query_lens, seq_lens = [1, 35, 16], [17, 40, 16]
    step = plan_device_step(query_lens, seq_lens, tables, layout)
    assert step.query_start_loc.tolist() == [0, 1, 17, 33, 36, 52]
    assert step.seq_lens.tolist() == [17, 21, 37, 40, 16]
    assert step.block_tables[:, 0].tolist() == [0, 10, 10, 10, 20]
    (run,) = step.runs
    assert (run.num_seqs, run.num_tokens, run.max_query_len, run.max_seq_len) == (5, 52, 16, 40)
    assert (run.is_short, run.min_split) == (True, 512)
    assert list_sizes(query_lens, seq_lens, layout) == [5 * 3, 5, 6]
    assert distinct_query_lens(layout) == [1]
    padded = padded_run(layout, 4, 9, 5000)
    assert (padded.num_tokens, padded.max_query_len, padded.min_split) == (36, 16, 512)


@pytest.mark.parametrize(
    ("max_seq_len", "expected"), [(1, 256), (16_384, 256), (16_385, 512), (131_072, 2048)]
)
def test_parts_of_a_fixed_size_cover_the_longest_sequence(max_seq_len: int, expected: int) -> None:
    assert fixed_split_for(max_seq_len) == expected
