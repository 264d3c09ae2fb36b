from __future__ import annotations

import pytest
import torch

from naiad_kernels.paged_attention.device_step import DeviceStep, plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout


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
