from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from kernel_interpreter import Interpret
from kernels_on_cpu import kernels_on_cpu
from perf.compile_gate.compiled import compile_launches

from helpers.kernel_tolerances import assert_close_to_reference
from helpers.sequence_steps import SequenceRow, step_of
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.model_runner.kv_pool import KVPool
from naiad.model_runner.paged_model import PagedModel
from naiad.models import load_model
from naiad.sequence import SamplingParams, Sequence
from naiad_kernels.linear import LoadOptions, linear, prepare_linear
from naiad_kernels.paged_attention.device_step import plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.store_kv import LayerCache

BLOCK = 16
CPU = torch.device("cpu")
NUM_KNOWN = 40
# Smaller than any split in service, so that the text is read in two parts.
SPLIT = 32


def matmul(left: np.ndarray, right: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A GPU's matrix instructions treat all rows of a tile alike; the interpreter's BLAS does not."""
    return (left.astype(dtype)[:, :, None] * right.astype(dtype)[None]).sum(axis=1)


def fixed_order(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with mock.patch.object(np, "matmul", matmul):
        return linear(x, prepare_linear(matrix, bias, LoadOptions(batch_invariant=True)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 70, 100), (65, 33, 64), (130, 64, 17)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_in_a_fixed_order(
    interpret: Interpret, sizes: tuple[int, int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_tokens, num_in, num_out = sizes
    x = torch.randn(num_tokens, 2 * num_in).to(dtype)[:, :num_in]
    matrix, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    actual = interpret(fixed_order, x, matrix, bias if has_bias else None)
    expected = x.float() @ matrix.float().T + (bias.float() if has_bias else 0)
    assert_close_to_reference(actual, expected.to(dtype))


def test_a_tokens_product_is_the_same_in_any_step(interpret: Interpret) -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(100, 200), torch.randn(90, 200)
    whole = interpret(fixed_order, x, matrix, None)
    for part in (slice(0, 1), slice(63, 66), slice(17, 99)):
        assert torch.equal(interpret(fixed_order, x[part], matrix, None), whole[part])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_spills_no_register(dtype: torch.dtype, capability: int) -> None:
    x, matrix = torch.empty(4, 576, dtype=dtype), torch.empty(960, 576, dtype=dtype)
    (compiled,) = compile_launches(lambda: fixed_order(x, matrix, None), capability)
    assert compiled.stack_bytes == 0
    assert (compiled.tensor_core_ops > 0) == (dtype == torch.bfloat16)


def attended(fixed_split: int, ends: list[int], window: int = 0) -> torch.Tensor:
    """The attention of a sequence's tokens, computed in chunks with these ends over cached earlier ones."""
    from naiad_kernels.paged_attention import kernel

    torch.manual_seed(0)
    layout = CacheLayout(3, 1, 16, BLOCK, torch.float16, CPU, fixed_split=fixed_split, window=window)
    query = torch.randn(ends[-1], 3, 16).half()
    cache = LayerCache(*(torch.randn(10, 1, BLOCK, 16).half() for _ in range(2)))
    parts = []
    with mock.patch.object(np, "matmul", matmul):
        for begin, end in pairwise([0, *ends]):
            step = plan_device_step([end - begin], [end], [[3, 1, 4, 9, 5, 2, 6, 8, 7, 0]], layout)
            parts.append(kernel.paged_attention(query[begin:end], cache, step, 0.25, 0.0))
    return torch.cat(parts)


@pytest.mark.parametrize("fixed_split", [64, 0])
def test_a_tokens_attention_is_the_same_in_any_chunk(interpret: Interpret, fixed_split: int) -> None:
    whole = interpret(attended, fixed_split, [100])
    chunks = interpret(attended, fixed_split, [1, 40, 98, 99, 100])
    assert torch.equal(whole, chunks) == (fixed_split > 0)
    torch.testing.assert_close(whole, chunks, atol=1e-2, rtol=1e-2)


def test_a_windows_place_in_a_chunk_changes_no_bit(interpret: Interpret) -> None:
    whole = interpret(attended, 32, [100], 41)
    chunks = interpret(attended, 32, [1, 40, 98, 99, 100], 41)
    assert torch.equal(whole, chunks)


def logits_of_text(directory: Path, nums_tokens: list[int], num_others: int) -> list[bytes]:
    """A text's logits at its last tokens, computed in steps of these sizes together with other texts."""
    config = ModelConfig.from_directory(directory)
    with torch.inference_mode():
        model = load_model(str(directory), config, LoadOptions(batch_invariant=True))
        pool = KVPool(config, [100], BLOCK, torch.float32, CPU)
    layout = CacheLayout(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        BLOCK,
        torch.float32,
        CPU,
        fixed_split=SPLIT,
    )
    runner = PagedModel(model, pool, layout, config.max_position_embeddings)
    text = sequence(99, NUM_KNOWN, list(range(99, 70, -1)))
    found: list[bytes] = []
    with kernels_on_cpu(), mock.patch.object(np, "matmul", matmul):
        for num_tokens in nums_tokens:
            end = text.num_computed_tokens + num_tokens
            rows = [SequenceRow(text, text.num_computed_tokens, num_tokens, end == text.num_tokens)]
            for index in range(num_others):
                other = sequence(index, 1 + 9 * index, [3 * index + n for n in range(3)])
                rows.insert(index % 2, SequenceRow(other, 0, other.num_tokens, True))
            output = runner.run(step_of(rows))
            text.num_computed_tokens = end
            text.token_ids += output.sampled_token_ids.get(99, [])
            found += output.generation_logits.get(99, [])
    return found


def sequence(sequence_id: int, num_tokens: int, block_table: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=9, returns_generation_logits=True)
    token_ids = [(7 * sequence_id + 5 * n) % 90 for n in range(num_tokens)]
    return Sequence(sequence_id, token_ids, num_tokens, params, 0.0, block_table=block_table)


def test_a_text_alone_has_the_logits_it_has_in_a_batch(interpret: Interpret, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    alone = interpret(logits_of_text, tmp_path, [NUM_KNOWN, 1], 0)
    among = interpret(logits_of_text, tmp_path, [3, 20, 17, 1], 2)
    assert len(alone) == 2
    assert alone == among
