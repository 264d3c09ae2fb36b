"""Run the real form of the kernels with tiles on a CPU without AMX, and compare it with its twin.

Its argument is `amx_traps.cpp`, compiled. Prints how often tiles were shaped at first and released.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial

import torch

from helpers.attention_cases import AttentionCase
from helpers.native_nibbles import four_bits, four_bits_and_minimums
from helpers.native_tapes import native_cache, positions_of, run_records, tables_of
from naiad_kernels.linear import linear
from naiad_kernels.native.build import load
from naiad_kernels.native.library import Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TracedGroup
from naiad_kernels.native.variants import PORTABLE_AMX, VARIANTS
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.silu_and_mul import silu_and_mul

ROWS_AND_THREADS = ((1, 1), (5, 3), (8, 1), (9, 1), (16, 2), (17, 1), (33, 2), (40, 3), (129, 2), (257, 2))


def outputs(team: Team, x: torch.Tensor, up: NativeWeight, down: NativeWeight) -> list[torch.Tensor]:
    """Of a bare layer, and of a gate whose product is added to its input."""
    return [
        run_records(team, lambda _, x: linear(x, up), x),
        run_records(team, lambda _, x: linear(silu_and_mul(linear(x, up)), down, x), x),
    ]


def compare(lay_out: Callable[[torch.Tensor], NativeWeight], scale: float) -> None:
    """For steps of one tile, of full tiles, of tiles with rows in common, and of rows that members share."""
    real, twin = load(VARIANTS[0]), load(PORTABLE_AMX).new_team(1)
    up, down = lay_out(torch.randn(352, 70) * scale), lay_out(torch.randn(70, 176))
    for num_rows, num_threads in ROWS_AND_THREADS:
        x = torch.randn(num_rows, 70) * scale
        made = outputs(real.new_team(num_threads), x, up, down)
        for ours, expected in zip(made, outputs(twin, x, up, down), strict=True):
            assert expected.count_nonzero() > 0
            assert torch.equal(ours, expected), (num_rows, num_threads, scale)


def attention(team: Team, case: AttentionCase) -> torch.Tensor:
    cache, window, cap = native_cache(case.cache()), case.layout.window, case.soft_cap
    return run_records(
        team,
        lambda _, query: paged_attention(query, cache, TracedGroup(0, window), None, cap),
        case.query.float().flatten(1),
        positions=positions_of(case.query_lens, case.seq_lens),
        tables=tables_of(case.query_lens, case.tables),
    )


def compare_attention() -> None:
    """Steps of decode and of chunks, heads that fill tiles and others, blocks of one group and of several."""
    real, twin = load(VARIANTS[0]), load(PORTABLE_AMX).new_team(1)
    for steps, heads, block_size, window, cap in (
        ([(1, 1), (1, 70), (1, 33)], (6, 2, 64), 64, 0, 0.0),
        ([(37, 550)], (6, 2, 64), 64, 0, 0.0),
        ([(5, 40), (1, 531)], (9, 3, 80), 16, 21, 0.0),
        ([(21, 21)], (2, 2, 10), 32, 0, 2.0),
        ([(3, 100)], (14, 1, 144), 32, 50, 0.0),
    ):
        case = AttentionCase(steps, heads, block_size, torch.bfloat16, window=window, soft_cap=cap)
        expected = attention(twin, case)
        assert expected.isfinite().all()
        for num_threads in (1, 3):
            made = attention(real.new_team(num_threads), case)
            assert torch.equal(made, expected), (steps, heads, num_threads)


def main() -> None:
    traps = ctypes.CDLL(sys.argv[1])
    traps.amx_traps_install()
    torch.manual_seed(0)
    for scale in (1.0, 2.0**-63):
        compare(lambda matrix: NativeWeight.of(matrix.bfloat16(), None), scale)
        compare(lambda matrix: NativeWeight.of(matrix.bfloat16(), None, torch.float32), scale)
        compare(lambda matrix: NativeWeight.quantised(matrix, None), scale)
    for in_four_bits in (four_bits, four_bits_and_minimums):
        num_before = traps.amx_traps_products()
        compare(partial(in_four_bits, bias=None), 1.0)
        assert traps.amx_traps_products() > num_before + 100
    compare_attention()
    assert traps.amx_traps_products() > 1000
    print(traps.amx_traps_shaped(), traps.amx_traps_released())


if __name__ == "__main__":
    main()
