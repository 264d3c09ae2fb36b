from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
from perf.compile_gate import __main__ as command
from perf.compile_gate.compiled import OLDEST_TRITON, SHARED_MEMORY_BYTES, CompiledKernel, compile_launches
from perf.compile_gate.served import (
    OPS,
    SHAPES,
    ServedShape,
    attention_launch,
    launches,
    quantised_launch,
)

from naiad_kernels.linear.quantised import ByteTokens, ByteWeight, kernel

BY_LABEL = {shape.label: shape for shape in SHAPES}
SMALL = BY_LABEL["SmolLM2-135M float16 16"]
LARGE = BY_LABEL["Llama-3.1-8B bfloat16 64"]
GEMMA_2 = BY_LABEL["Gemma-2-9B bfloat16 64"]
INT8_CACHE = BY_LABEL["SmolLM2-135M float16 16 int8"]
FP8_CACHE = BY_LABEL["Llama-3.1-8B bfloat16 64 float8_e4m3fn"]
# Compiled in every run: all kernels for one GPU, and for the other those that differ most. The slow test
# compiles all of `SHAPES`.
QUICK = [
    *((SMALL, 80, op) for op in OPS[:-2]),
    *((LARGE, 90, op) for op in ("attention", "quantised, one token")),
    *((INT8_CACHE, 80, op) for op in INT8_CACHE.ops),
    (FP8_CACHE, 90, "cache"),
]
ALL = [(shape, capability, op) for shape in SHAPES for capability in shape.capabilities for op in shape.ops]
# Bytes that may be spilled with the oldest triton, which assigns the last of these kernels 40 registers
# instead of 58 and two too few to each of the others. With the newest triton nothing is spilled.
SPILLED = {
    ("SmolLM2-135M float16 16", "w4a16_kernel", 90): 8,
    ("Llama-3.1-8B bfloat16 64", "w4a16_kernel", 90): 8,
    ("head_dim 96 bfloat16 64", "short_attention_kernel", 90): 8,
    ("head_dim 80 bfloat16 32 int8", "short_attention_kernel", 90): 8,
    ("head_dim 96 bfloat16 64 float8_e4m3fn", "short_attention_kernel", 90): 8,
    ("head_dim 80 bfloat16 32", "_kept_threshold_kernel", 80): 16,
    ("head_dim 96 bfloat16 64", "_kept_threshold_kernel", 80): 16,
    ("head_dim 256 bfloat16 64", "_kept_threshold_kernel", 80): 16,
    ("head_dim 256 float32 16", "_kept_threshold_kernel", 80): 16,
}
MATRIX_KERNELS = {
    *("short_attention_kernel", "long_attention_kernel", "w4a16_kernel", "byte_kernel"),
    *("_lora_shrink_kernel", "_lora_expand_kernel", "_fixed_order_linear_kernel"),
}


def assert_fits(compiled: list[CompiledKernel], shape: ServedShape) -> None:
    for each in compiled:
        is_oldest = triton.__version__ == OLDEST_TRITON
        allowed = SPILLED.get((shape.label, each.kernel, each.capability), 0) if is_oldest else 0
        assert each.stack_bytes <= allowed, f"{shape.label}: spilled registers: {each}"
        assert each.shared_bytes <= SHARED_MEMORY_BYTES[each.capability], f"{shape.label}: {each}"
        needs_tensor_cores = each.kernel in MATRIX_KERNELS and shape.dtype != torch.float32
        assert (each.tensor_core_ops > 0) == needs_tensor_cores, f"{shape.label}: {each}"


def case_id(case: ServedShape | int | str) -> str:
    return case.label if isinstance(case, ServedShape) else str(case)


@pytest.mark.parametrize(("shape", "capability", "op"), QUICK, ids=case_id)
def test_kernels_compile_and_fit(shape: ServedShape, capability: int, op: str) -> None:
    assert_fits(compile_launches(launches(shape, op), capability), shape)


@pytest.mark.parametrize("capability", [80, 90])
def test_windows_and_caps_compile_and_fit(capability: int) -> None:
    for length in (5, 100):
        launch = attention_launch(GEMMA_2, [length], [1_000], window=GEMMA_2.windows[0])
        assert_fits(compile_launches(launch, capability), GEMMA_2)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "capability", "op"), ALL, ids=case_id)
def test_every_served_shape_compiles_and_fits(shape: ServedShape, capability: int, op: str) -> None:
    assert_fits(compile_launches(launches(shape, op), capability), shape)


def test_the_oldest_triton_is_what_is_allowed() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"triton>={OLDEST_TRITON.rpartition(".")[0]}"' in pyproject


def test_the_page_has_rows_for_every_shape_and_gpu() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    for shape in SHAPES:
        for capability in shape.capabilities:
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


def test_numbers_of_tokens_compile_nothing_new() -> None:
    """A step of few tokens runs the same code for all of them, whatever divides their number."""
    compiled = [
        each
        for num_tokens in (1, 3, 8, 16)
        for each in compile_launches(quantised_launch(SMALL, num_tokens, [128]), 80)
    ]
    kernels = {each.kernel for each in compiled}
    assert kernels == {"w4a16_kernel", "byte_kernel", "sum_slabs_kernel", "quantize_tokens_kernel"}
    # Four bits are whole numbers and floats; bytes are multiplied by floats and by bytes. The sum of slabs
    # applies no scales with four bits, those of outputs with eight, and those of tokens too if inputs are
    # rounded.
    assert len({each.variant for each in compiled}) == len(kernels) + 4


def test_fp8_is_refused_before_hopper() -> None:
    x = torch.empty(1, 128, dtype=torch.float16)
    with pytest.raises(ValueError, match="quantize_tokens: this GPU is older than sm_90"):
        compile_launches(lambda: kernel.quantize_tokens(x), 80)
    tokens = ByteTokens(torch.empty(1, 128, dtype=torch.float8_e4m3fn), torch.empty(1))
    weight = ByteWeight(torch.empty(8, 128, dtype=torch.float8_e4m3fn), torch.empty(8))
    with pytest.raises(ValueError, match="w8a8_linear: this GPU is older than sm_90"):
        compile_launches(lambda: kernel.w8a8_linear(tokens, weight, torch.float16), 80)


def test_help_writes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["perf.compile_gate", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    assert "PAGE" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
