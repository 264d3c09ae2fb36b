from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from naiad_kernels.compile_gate.compiled import SHARED_MEMORY_BYTES, CompiledKernel, compile_launches
from naiad_kernels.compile_gate.served import OPS, SHAPES, ServedShape, attention_launch, launches

CAPABILITIES = sorted(SHARED_MEMORY_BYTES)
BY_LABEL = {shape.label: shape for shape in SHAPES}
SMALL = BY_LABEL["SmolLM2-135M float16 16"]
# Compiled in every run: each kernel for each GPU. The slow test compiles all of `SHAPES`.
QUICK = [(SMALL, 80), (BY_LABEL["Llama-3.1-8B bfloat16 64"], 90)]
MATRIX_KERNELS = {
    *("short_attention_kernel", "long_attention_kernel", "_lora_shrink_kernel", "_lora_expand_kernel"),
}


def assert_fits(compiled: list[CompiledKernel], shape: ServedShape) -> None:
    for each in compiled:
        assert each.stack_bytes == 0, f"{shape.label}: spilled registers: {each}"
        assert each.shared_bytes <= SHARED_MEMORY_BYTES[each.capability], f"{shape.label}: {each}"
        needs_tensor_cores = each.kernel in MATRIX_KERNELS and shape.dtype != torch.float32
        assert (each.tensor_core_ops > 0) == needs_tensor_cores, f"{shape.label}: {each}"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("shape", "capability"), QUICK, ids=[shape.label for shape, _ in QUICK])
def test_kernels_compile_and_fit(shape: ServedShape, op: str, capability: int) -> None:
    assert_fits(compile_launches(launches(shape, op), capability), shape)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.label)
def test_every_served_shape_compiles_and_fits(shape: ServedShape, op: str, capability: int) -> None:
    assert_fits(compile_launches(launches(shape, op), capability), shape)


def test_the_page_has_rows_for_every_shape_and_gpu() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    for shape in SHAPES:
        for capability in CAPABILITIES:
            assert re.search(
                rf"^\| {re.escape(shape.label)} \| \w+ \| sm_{capability} \|", page, re.MULTILINE
            )


@pytest.mark.parametrize(
    ("query_len", "kernels"),
    [
        (1, {"short_attention_kernel", "merge_splits_kernel"}),
        (100, {"long_attention_kernel"}),
    ],
)
def test_sizes_of_a_step_compile_nothing_new(query_len: int, kernels: set[str]) -> None:
    """Numbers of sequences, tokens and blocks, divisible by 16 or not, run the same code."""
    compiled: list[CompiledKernel] = []
    for num_seqs, seq_len in ((1, 300), (2, 1000), (16, 256 * 16), (17, 20_000)):
        step = attention_launch(SMALL, [query_len] * num_seqs, [seq_len] * num_seqs)
        compiled += compile_launches(step, 90)
    assert {each.kernel for each in compiled} == kernels
    assert len({each.variant for each in compiled}) == len(kernels)
