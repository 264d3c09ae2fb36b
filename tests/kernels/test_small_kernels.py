from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret

from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.gelu_and_mul import reference as gelu_reference
from naiad_kernels.rms_norm import kernel as rms_norm_kernel
from naiad_kernels.rms_norm import reference as rms_norm_reference
from naiad_kernels.rotary import kernel as rotary_kernel
from naiad_kernels.rotary import reference as rotary_reference
from naiad_kernels.rotary import rotary_angles
from naiad_kernels.silu_and_mul import kernel as gated_kernel
from naiad_kernels.silu_and_mul import reference as silu_reference
from naiad_kernels.store_kv import LayerCache, Slots
from naiad_kernels.store_kv import kernel as store_kv_kernel
from naiad_kernels.store_kv import reference as store_kv_reference

DTYPES = [torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 48), (1, 1), (1, 64), (3, 51), (5, 1030)])
def test_rms_norm(interpret: Interpret, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected = rms_norm_reference.rms_norm(x, weight, 1e-5)
    assert_close_to_reference(interpret(rms_norm_kernel.rms_norm, x, weight, 1e-5), expected)


@pytest.mark.parametrize("weight_shape", [(7,), (9, 7), (1, 7)])
def test_rms_norm_of_heads(interpret: Interpret, weight_shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(35, 12, 7)[:, 1:10], torch.randn(weight_shape)
    expected = rms_norm_reference.rms_norm(x, weight, 1e-6)
    assert_close_to_reference(interpret(rms_norm_kernel.rms_norm, x, weight, 1e-6), expected)


def test_rms_norm_with_a_weight_of_more_bits(interpret: Interpret) -> None:
    """Only the result is rounded, as in the reference; with a weight of the same dtype it would differ."""
    x, residual, weight = torch.randn(40, 96).half(), torch.randn(40, 96).half(), 1 + torch.randn(96) / 8
    expected = rms_norm_reference.rms_norm(x, weight, 1e-6)
    wide = rms_norm_reference.rms_norm(x.float(), weight, 1e-6)
    assert torch.equal(expected, wide.half())
    assert not torch.equal(expected, rms_norm_reference.rms_norm(x, weight.half(), 1e-6))
    actual = interpret(rms_norm_kernel.rms_norm, x, weight, 1e-6)
    assert_close_to_reference(actual, expected)
    assert (actual != expected).float().mean() < 0.01
    normed, total = interpret(rms_norm_kernel.add_rms_norm, x, residual, weight, 1e-6)
    expected, expected_total = rms_norm_reference.add_rms_norm(x, residual, weight, 1e-6)
    assert_close_to_reference(normed, expected)
    assert torch.equal(total, expected_total)


def test_rms_norm_of_a_column_slice(interpret: Interpret) -> None:
    x, weight = torch.randn(10, 4).T, torch.randn(10)
    expected = rms_norm_reference.rms_norm(x, weight, 1e-6)
    assert_close_to_reference(interpret(rms_norm_kernel.rms_norm, x, weight, 1e-6), expected)


def test_rms_norm_of_a_zero_vector_is_zero(interpret: Interpret) -> None:
    assert torch.equal(
        interpret(rms_norm_kernel.rms_norm, torch.zeros(2, 6), torch.ones(6), 1e-6), torch.zeros(2, 6)
    )


def test_rms_norm_keeps_a_nan_in_its_row(interpret: Interpret) -> None:
    x, weight = torch.randn(5, 9, 7), torch.randn(9, 7)
    expected = rms_norm_reference.rms_norm(x, weight, 1e-6)
    x[2, 3, 1] = torch.nan
    actual = interpret(rms_norm_kernel.rms_norm, x, weight, 1e-6)
    assert actual[2, 3].isnan().all()
    actual[2, 3] = expected[2, 3]
    assert_close_to_reference(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 33), (4, 51)])
def test_add_rms_norm(interpret: Interpret, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
    before = x.clone(), residual.clone()
    normed, total = interpret(rms_norm_kernel.add_rms_norm, x, residual, weight, 1e-5)
    expected = rms_norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close_to_reference(normed, expected[0])
    assert torch.equal(total, expected[1])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 8), (1, 1), (3, 53), (2, 1024), (2, 1025)])
def test_silu_and_mul(interpret: Interpret, num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_tokens, 2 * dim).to(dtype)
    expected = silu_reference.silu_and_mul(gate_up)
    assert_close_to_reference(interpret(gated_kernel.activate_and_mul, gate_up, "silu"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 8), (1, 1), (3, 53), (2, 1025)])
@pytest.mark.parametrize(("approximate", "activation"), [("none", "gelu"), ("tanh", "gelu_tanh")])
def test_gelu_and_mul(
    interpret: Interpret, approximate: str, activation: str, num_tokens: int, dim: int, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * dim) * 4).to(dtype)
    expected = gelu_reference.gelu_and_mul(gate_up, approximate)
    assert_close_to_reference(interpret(gated_kernel.activate_and_mul, gate_up, activation), expected)


def test_silu_and_mul_of_part_of_a_wider_row(interpret: Interpret) -> None:
    gate_up = torch.full((3, 40), torch.nan)
    gate_up[:, 4:30] = torch.randn(3, 26)
    part = gate_up[:, 4:30]
    expected = silu_reference.silu_and_mul(part)
    assert_close_to_reference(interpret(gated_kernel.activate_and_mul, part, "silu"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"), [(0, 2, 8), (1, 1, 2), (3, 7, 10), (2, 12, 80), (2, 17, 128)]
)
def test_rotary(
    interpret: Interpret, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    # The last two heads of a wider row are values, which are not rotated.
    heads = torch.randn(num_tokens, num_heads + 2, head_dim).to(dtype)[:, :num_heads]
    angles = rotary_angles(torch.arange(num_tokens) + 100, torch.rand(head_dim // 2), dtype)
    expected = rotary_reference.rotary(heads, *angles)
    assert_close_to_reference(interpret(rotary_kernel.rotary, heads, *angles), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"), [(1, 2, 16), (3, 10, 16), (2, 80, 32), (12, 128, 128)]
)
def test_store_kv(
    interpret: Interpret, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    caches = [torch.full((5, num_kv_heads, block_size, head_dim), torch.nan).to(dtype) for _ in range(4)]
    # Keys are between queries and values, as after a fused projection.
    heads = torch.randn(4, 3 * num_kv_heads, head_dim).to(dtype)
    key, value = heads[:, num_kv_heads : 2 * num_kv_heads], heads[:, 2 * num_kv_heads :]
    slots = Slots.from_slot_mapping(
        torch.tensor([0, 5 * block_size - 1, 2 * block_size + 3, block_size]), block_size
    )
    interpret(store_kv_kernel.store_kv, key, value, LayerCache(*caches[:2]), slots)
    store_kv_reference.store_kv(key, value, LayerCache(*caches[2:]), slots)
    torch.testing.assert_close(caches[:2], caches[2:], rtol=0, atol=0, equal_nan=True)


def test_store_kv_skips_padding(interpret: Interpret) -> None:
    # Block −1 would be in the memory before the cache.
    guarded = [torch.full((4, 2, 16, 8), torch.nan) for _ in range(2)]
    caches = [cache[1:] for cache in guarded]
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = Slots.from_slot_mapping(torch.tensor([-1, 20, -1]), 16)
    interpret(store_kv_kernel.store_kv, key, value, LayerCache(*caches), slots)
    assert torch.equal(caches[0][1, :, 4], key[1])
    assert torch.equal(caches[1][1, :, 4], value[1])
    assert all(cache.isnan().sum() == cache.numel() - 16 for cache in guarded)
