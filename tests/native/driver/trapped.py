"""Run the real form of the kernels with tiles on a CPU without AMX, and compare it with its twin.

Its argument is `amx_traps.cpp`, compiled. Prints how often tiles were shaped and released.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch

from helpers.native_tapes import run_records
from naiad_kernels.linear import linear
from naiad_kernels.native.build import load
from naiad_kernels.native.library import Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.variants import PORTABLE_AMX, VARIANTS
from naiad_kernels.silu_and_mul import silu_and_mul


def outputs(team: Team, x: torch.Tensor, up: NativeWeight, down: NativeWeight) -> list[torch.Tensor]:
    """Of a bare layer, and of a gate whose product is added to its input."""
    return [
        run_records(team, lambda _, x: linear(x, up), x),
        run_records(team, lambda _, x: linear(silu_and_mul(linear(x, up)), down, x), x),
    ]


def compare(lay_out: Callable[[torch.Tensor], NativeWeight], scale: float) -> None:
    """For steps of one tile, of full tiles, and of tiles with rows in common."""
    real, twin = load(VARIANTS[0]), load(PORTABLE_AMX).new_team(1)
    up, down = lay_out(torch.randn(352, 70) * scale), lay_out(torch.randn(70, 176))
    for num_rows, num_threads in ((1, 1), (5, 3), (16, 2), (17, 1), (33, 2), (40, 3)):
        x = torch.randn(num_rows, 70) * scale
        made = outputs(real.new_team(num_threads), x, up, down)
        for ours, expected in zip(made, outputs(twin, x, up, down), strict=True):
            assert expected.count_nonzero() > 0
            assert torch.equal(ours, expected), (num_rows, num_threads, scale)


def main() -> None:
    traps = ctypes.CDLL(sys.argv[1])
    traps.amx_traps_install()
    torch.manual_seed(0)
    for scale in (1.0, 2.0**-63):
        compare(lambda matrix: NativeWeight.of(matrix.bfloat16(), None), scale)
        compare(lambda matrix: NativeWeight.quantised(matrix, None), scale)
    assert traps.amx_traps_products() > 1000
    print(traps.amx_traps_shaped(), traps.amx_traps_released())


if __name__ == "__main__":
    main()
