from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from naiad_kernels.gelu_and_mul import Approximate, gelu_and_mul
from naiad_kernels.gelu_and_mul import reference as gelu_reference
from naiad_kernels.linear import half_weight, linear, prepare_linear
from naiad_kernels.linear import reference as linear_reference
from naiad_kernels.rms_norm import reference as rms_norm_reference
from naiad_kernels.rms_norm import rms_norm
from naiad_kernels.rotary import reference as rotary_reference
from naiad_kernels.rotary import rotary, rotary_angles
from naiad_kernels.silu_and_mul import reference as silu_reference
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache, Slots, store_kv
from naiad_kernels.store_kv.quantize import LARGEST_CODE, dequantize, quantize

NUM_TOKENS = [1, 2, 7, 33]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


LAYOUTS: dict[str, torch.dtype] = {"narrow": torch.bfloat16, "wide": torch.float32}


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("stored", list(LAYOUTS))
def test_linear_equals_the_reference(
    num_tokens: int, has_bias: bool, has_residual: bool, stored: str
) -> None:
    matrix, x = torch.randn(37, 51).to(LAYOUTS[stored]).float(), torch.randn(num_tokens, 51)
    bias = torch.randn(37) if has_bias else None
    residual = torch.randn(num_tokens, 37) if has_residual else None
    before = None if residual is None else residual.clone()
    actual = linear(x, prepare_linear(matrix, bias), residual)
    torch.testing.assert_close(
        actual, linear_reference.linear(x, matrix, bias, residual), atol=1e-4, rtol=1e-5
    )
    assert residual is None or torch.equal(residual, before)


@pytest.mark.skipif(not half_weight.can_narrow(torch.ones(8, 8)), reason="torch can not run FBGEMM here")
def test_weights_are_narrowed_only_if_float32_does_not_tell() -> None:
    stored_in_16_bits = torch.randn(64, 48).bfloat16().float()
    assert half_weight.can_narrow(stored_in_16_bits)
    tiny = stored_in_16_bits.clone()
    tiny[0, 0] = 1e-30
    assert half_weight.can_narrow(tiny)
    full = stored_in_16_bits.clone()
    full[0, 0] = 1 + 2**-20
    assert not half_weight.can_narrow(full)
    assert not half_weight.can_narrow(stored_in_16_bits * 1e6)
    assert not half_weight.can_narrow(stored_in_16_bits * 1e-6)
    assert not half_weight.can_narrow(stored_in_16_bits.bfloat16())


def test_linear_without_a_packed_layout() -> None:
    matrix, x = torch.randn(8, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(linear(x, prepare_linear(matrix)), x @ matrix.T)


@pytest.mark.parametrize("stored", list(LAYOUTS))
def test_a_nan_row_stays_in_its_row_of_a_product(stored: str) -> None:
    x = torch.randn(9, 51)
    weight = prepare_linear(torch.randn(37, 51).to(LAYOUTS[stored]).float())
    expected = linear(x, weight)
    x[4] = torch.nan
    actual = linear(x, weight)
    assert actual[4].isnan().all()
    torch.testing.assert_close(actual[[0, 3, 5, 8]], expected[[0, 3, 5, 8]])


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rms_norm_equals_the_reference(num_tokens: int) -> None:
    x, weight = torch.randn(num_tokens, 51), torch.randn(51)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_a_zero_vector_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 6), torch.ones(6), 1e-6), torch.zeros(2, 6))


def test_rms_norm_of_heads_takes_a_weight_a_head() -> None:
    x, weight = torch.randn(5, 12, 7)[:, :9], torch.randn(9, 7)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_equals_the_reference(dtype: torch.dtype) -> None:
    gate_up = torch.randn(7, 2 * 53).to(dtype)
    torch.testing.assert_close(silu_and_mul(gate_up), silu_reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_and_mul_equals_the_reference(dtype: torch.dtype, approximate: Approximate) -> None:
    gate_up = (torch.randn(7, 2 * 53) * 4).to(dtype)
    expected = gelu_reference.gelu_and_mul(gate_up, approximate)
    torch.testing.assert_close(gelu_and_mul(gate_up, approximate), expected)


def test_gelu_by_the_error_function_is_torchs() -> None:
    """Torch has both forms; they differ."""
    gate = torch.linspace(-6, 6, 101)
    gate_up = torch.stack((gate, torch.ones(101)), dim=1)
    results = [gelu_reference.gelu_and_mul(gate_up, form)[:, 0] for form in ("none", "tanh")]
    for result, form in zip(results, ("none", "tanh"), strict=True):
        torch.testing.assert_close(result, F.gelu(gate, approximate=form))
    assert not torch.allclose(*results, atol=1e-4)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rotary_equals_the_reference(num_tokens: int) -> None:
    heads = torch.randn(num_tokens, 9, 10)[:, :7]
    angles = rotary_angles(torch.arange(num_tokens) + 100, torch.rand(5), torch.float32)
    torch.testing.assert_close(rotary(heads, *angles), rotary_reference.rotary(heads, *angles))


def test_rotary_at_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 3, 8)
    assert torch.equal(rotary(x, *rotary_angles(torch.tensor([0]), torch.rand(4), torch.float32)), x)


def test_store_kv_writes_its_slots_and_no_others() -> None:
    key_cache, value_cache = torch.zeros(5, 2, 16, 6), torch.zeros(5, 2, 16, 6)
    key, value = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    slot_mapping = torch.tensor([0, 4 * 16 + 15, 2 * 16 + 3])
    store_kv(key, value, LayerCache(key_cache, value_cache), Slots.from_slot_mapping(slot_mapping, 16))
    for token, (block, offset) in enumerate([(0, 0), (4, 15), (2, 3)]):
        assert torch.equal(key_cache[block, :, offset], key[token])
        assert torch.equal(value_cache[block, :, offset], value[token])
    assert key_cache.count_nonzero() == key.numel()
    assert value_cache.count_nonzero() == value.numel()


CODES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("codes", CODES)
def test_a_code_is_within_half_a_step_of_its_value(codes: torch.dtype) -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]
    stored, scale = quantize(x, codes)
    assert scale.shape == x.shape[:-1]
    error = (dequantize(stored, scale, torch.float32) - x).abs()
    # The steps of float8 grow with the values: an eighth of the power of two below them.
    step = scale[..., None].expand_as(x)
    if codes == torch.float8_e4m3fn:
        step = (x.abs() / 8).maximum(step * 2**-9)
    assert (error <= step * 0.5001).all()
    assert torch.equal(stored.float().abs().amax(-1), torch.full((50, 3), LARGEST_CODE[codes]))


@pytest.mark.parametrize("codes", CODES)
def test_store_kv_quantizes(codes: torch.dtype) -> None:
    rows = (5, 2, 16)
    cache = LayerCache(
        torch.zeros(*rows, 6).to(codes), torch.zeros(*rows, 6).to(codes), torch.zeros(rows), torch.zeros(rows)
    )
    key, value = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    slots = Slots.from_slot_mapping(torch.tensor([0, 4 * 16 + 15, 2 * 16 + 3]), 16)
    store_kv(key, value, cache, slots)
    for part, scale, source in ((cache.key, cache.key_scale, key), (cache.value, cache.value_scale, value)):
        assert scale is not None
        expected_codes, expected_scale = quantize(source, codes)
        assert torch.equal(scale[slots.blocks, :, slots.offsets], expected_scale)
        assert torch.equal(part[slots.blocks, :, slots.offsets].float(), expected_codes.float())
        assert scale.count_nonzero() == 6


@pytest.mark.parametrize(
    "scales", [(None, torch.zeros(2, 1, 4)), (torch.zeros(2, 4), torch.zeros(2, 4)), (None, None)]
)
def test_a_quantized_cache_without_its_scales_is_refused(
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    codes = torch.zeros(2, 1, 4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^cache\.key"):
        LayerCache(codes, codes, *scales).check(torch.float32)
