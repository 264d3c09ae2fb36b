# triton-lang functions: constants are upper case.
# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from perf.compile_gate.compiled import _collecting, compile_launches
from perf.compile_gate.served import SHAPES, ServedShape, attention_launch
from triton import knobs

from naiad_kernels.compile_counter import CompileCounter
from naiad_kernels.paged_attention.device_step import distinct_query_lens


@triton.jit
def _copy_kernel(out_ptr, in_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, SIZE)
    tl.store(out_ptr + columns, tl.load(in_ptr + columns))


def launch_copy(size: int) -> None:
    parts = torch.empty(2, size)
    _copy_kernel[(1,)](parts[0], parts[1], SIZE=size, enable_fp_fusion=True)


def test_a_variant_counts_once_for_every_counter() -> None:
    first = CompileCounter()
    compile_launches(lambda: launch_copy(64), 80)
    second = CompileCounter()
    for size in (64, 128, 128):
        compile_launches(lambda size=size: launch_copy(size), 80)  # type: ignore[misc]
    assert (first.num_compiled, second.num_compiled) == (2, 1)


# The capability of no real GPU: kernels that are already compiled for one do not reach the hook.
NO_GPU = 91


def wanted(launch: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names and keys of the variants that a launch would compile, without compiling them."""
    keys: set[str] = set()

    def note(*, key: str, fn: Any, **_: object) -> bool:
        keys.add(f"{fn.name} {key}")
        return True

    with monkeypatch.context() as patch, _collecting(NO_GPU):
        patch.setattr(knobs.runtime, "jit_cache_hook", note)
        launch()
    return keys


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
def test_any_step_launches_what_the_distinct_ones_do(
    shape: ServedShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    distinct: set[str] = set()
    window = shape.windows[0]
    for length in distinct_query_lens(shape.layout()):
        distinct |= wanted(attention_launch(shape, [length], [1_000], window=window), monkeypatch)
    steps = [([length], [1_000]) for length in (*range(1, 80), 500)]
    steps.append(([1, 1, 2, 3, 9, 40, 300], [1, 999, 2, 700, 9, 40, 16_000]))
    every = {
        key for step in steps for key in wanted(attention_launch(shape, *step, window=window), monkeypatch)
    }
    assert every == distinct
    assert len(distinct) > 2
