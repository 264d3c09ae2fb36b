"""Native kernels get no memory for a step: they say so, and the process goes on. The argument names the case.

`ENVIRONMENT` makes malloc ask the system for all that is large, so that the limit is met.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from naiad.models.native_picker import NativePicker
from naiad_kernels.draw_tokens import Draws
from naiad_kernels.kept_threshold import RowFilters
from naiad_kernels.linear import linear
from naiad_kernels.native.build import load
from naiad_kernels.native.library import Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TapeRecorder
from naiad_kernels.native.tape import Tape
from naiad_kernels.native.variants import PORTABLE

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "1"}
# Kernels need 16 MiB and more.
SLACK_BYTES = 4 << 20
# Whether it is a large step → whether the result is right.
Compute = Callable[[bool], bool]


def product(team: Team) -> Compute:
    """Rounded inputs lie in memory that members share."""
    num_tokens, width = 1024, 8192
    recorder = TapeRecorder(torch.bfloat16)
    weight = NativeWeight.of(torch.ones(16, width, dtype=torch.bfloat16), None, torch.bfloat16)
    tape = Tape(recorder.finish(linear(recorder.rows(width), weight)), team)
    tape._reserve(num_tokens)
    x = torch.ones(num_tokens, width)

    def compute(is_large: bool) -> bool:
        count = num_tokens if is_large else 3
        return bool((tape.run(count, inputs=[x[:count]]) == width).all())

    return compute


def draw(team: Team) -> Compute:
    """Candidates of filters lie in memory of each member's own."""
    width = 2 << 20
    picker = NativePicker(width, team)
    logits = torch.zeros(1, width)
    logits[0, 7] = 100
    filters = RowFilters(
        torch.ones(1, dtype=torch.float64),
        torch.full((1,), 3),
        torch.full((1,), 0.9, dtype=torch.float64),
        torch.full((1,), -float("inf"), dtype=torch.float64),
    )
    draws = Draws(filters, torch.ones(1, dtype=torch.int64), torch.full((1,), -1))

    def compute(is_large: bool) -> bool:
        best = picker(logits, draws if is_large else None)
        return best.token_ids.item() == 7 and (not is_large or draws.token_ids.item() == 7)

    return compute


def buffers(team: Team) -> Compute:
    """The rows between two products lie in memory that grows with the step."""
    num_tokens, width, wide = 1 << 13, 64, 1 << 10
    recorder = TapeRecorder()
    rows = recorder.rows(width)
    for num_outputs, num_inputs in ((wide, width), (16, wide)):
        rows = linear(rows, NativeWeight.of(torch.ones(num_outputs, num_inputs), None))
    tape = Tape(recorder.finish(rows), team)
    x = torch.ones(num_tokens, width)

    def compute(is_large: bool) -> bool:
        count = num_tokens if is_large else 3
        return bool((tape.run(count, inputs=[x[:count]]) == width * wide).all())

    return compute


CASES = {"product": product, "draw": draw, "buffers": buffers}


def main() -> None:
    compute = CASES[sys.argv[1]](load(PORTABLE).new_team(2))
    assert compute(False)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + SLACK_BYTES, hard))
    for _ in range(2):
        with pytest.raises(MemoryError, match="native kernels"):
            compute(True)
        assert compute(False)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert compute(True)


if __name__ == "__main__":
    main()
