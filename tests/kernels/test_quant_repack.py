from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quant_cases import Int4Layer, fp8_layer, int4_layer, int8_layer

from naiad_kernels.linear import LinearWeight, linear
from naiad_kernels.linear.quantised import (
    Int4Tensors,
    W4Weight,
    repack_awq,
    repack_gptq,
    repack_nibbles,
    w4a16_linear,
)
from naiad_kernels.native.nibbles import NibbleWeight

SIZES = [(8, 8, -1), (64, 16, 32), (96, 8, 64), (128, 24, 128), (136, 8, 128), (576, 16, 64), (320, 8, -1)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def matrix_of(weight: W4Weight) -> torch.Tensor:
    """Every weight, exactly: each row of the identity matrix selects one row."""
    return w4a16_linear(torch.eye(weight.in_features), replace(weight, bias=None))


@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
def test_gptq_is_repacked_exactly(sizes: tuple[int, int, int], zero_offset: int) -> None:
    layer = int4_layer(*sizes)
    weight = repack_gptq(layer.as_gptq(zero_offset), layer.group_size, zero_offset)
    assert torch.equal(matrix_of(weight), layer.matrix())
    assert weight.input_order is None


@pytest.mark.parametrize("sizes", SIZES)
def test_awq_is_repacked_exactly(sizes: tuple[int, int, int]) -> None:
    layer = int4_layer(*sizes)
    assert torch.equal(matrix_of(repack_awq(layer.as_awq(), layer.group_size)), layer.matrix())


@pytest.mark.parametrize("sizes", [(64, 8, 32), (200, 8, 64), (384, 16, 128)])
def test_act_order_is_repacked_exactly(sizes: tuple[int, int, int]) -> None:
    layer = int4_layer(*sizes).shuffled()
    weight = repack_gptq(layer.as_gptq(), layer.group_size)
    assert weight.input_order is not None
    assert torch.equal(matrix_of(weight), layer.matrix())


def test_known_words() -> None:
    """Written by hand: eight inputs and outputs, one code that is not 0 in each."""
    gptq = Int4Tensors(
        qweight=torch.tensor([[7 << (4 * column) for column in range(7)] + [7 << 28]], dtype=torch.int32),
        qzeros=torch.tensor([[0x10000000]], dtype=torch.int32),
        scales=torch.ones(1, 8),
    )
    expected = torch.eye(8) * 7 - torch.tensor([1.0] * 7 + [2.0])
    assert torch.equal(matrix_of(repack_gptq(gptq, -1)), expected)
    awq = Int4Tensors(
        qweight=torch.tensor([[0x75316420]], dtype=torch.int32),
        qzeros=torch.tensor([[0x00000010]], dtype=torch.int32),
        scales=torch.ones(1, 8),
    )
    assert matrix_of(repack_awq(awq, -1)).tolist() == [[0, 1, 1, 3, 4, 5, 6, 7]]


def test_a_stored_zero_of_15_means_16() -> None:
    layer = int4_layer(32, 8, 32)
    layer.zeros[0, 3] = 16
    assert torch.equal(matrix_of(repack_gptq(layer.as_gptq(), 32)), layer.matrix())


def test_the_bias_is_added() -> None:
    layer = int4_layer(64, 8, 32, has_bias=True)
    assert layer.bias is not None
    x = torch.randn(3, 64)
    expected = x @ layer.matrix() + layer.bias.float()
    for weight in (repack_gptq(layer.as_gptq(), 32), repack_awq(layer.as_awq(), 32)):
        torch.testing.assert_close(w4a16_linear(x, weight), expected)


@pytest.mark.parametrize("group_size", [0, -2, 16, 48, 100, 192])
def test_other_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size: {group_size}; allowed: -1, 32, 64"):
        repack_gptq(int4_layer(64, 8, 32).as_gptq(), group_size)
    with pytest.raises(ValueError, match=f"group_size: {group_size}; allowed: -1, 32, 64"):
        repack_awq(int4_layer(64, 8, 32).as_awq(), group_size)


BAD_TENSORS = {
    "qweight": [torch.zeros(8, 8), torch.zeros(8, dtype=torch.int32)],
    "qzeros": [torch.zeros(2, 1), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)],
    "scales": [torch.ones(1, 8), torch.ones(2, 4), torch.ones(2, 8, dtype=torch.int32)],
    "bias": [torch.ones(7), torch.ones(1, 8)],
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_named(name: str) -> None:
    layer = int4_layer(64, 8, 32)
    for bad in BAD_TENSORS[name]:
        with pytest.raises(ValueError, match=f"^{name}: .*; allowed: "):
            repack_gptq(replace(layer.as_gptq(), **{name: bad}), 32)
        with pytest.raises(ValueError, match=f"^{name}: .*; allowed: "):
            repack_awq(replace(layer.as_awq(), **{name: bad}), 32)


def test_outputs_that_do_not_fill_words_are_refused() -> None:
    tensors = Int4Tensors(
        qweight=torch.zeros(4, 12, dtype=torch.int32),
        qzeros=torch.zeros(1, 1, dtype=torch.int32),
        scales=torch.ones(1, 12),
    )
    with pytest.raises(ValueError, match="qweight: 12 outputs; allowed: a multiple of 8"):
        repack_gptq(tensors, 32)


def test_act_order_of_a_part_of_a_layer_is_refused() -> None:
    layer: Int4Layer = int4_layer(64, 8, 32)
    uneven = replace(layer.as_gptq(), g_idx=torch.tensor([0] * 33 + [1] * 31))
    with pytest.raises(ValueError, match="g_idx: groups that are not of 32 inputs each"):
        repack_gptq(uneven, 32)
    with pytest.raises(ValueError, match=r"g_idx: shape \[8\]; allowed: \[64\]"):
        repack_gptq(replace(uneven, g_idx=torch.zeros(8, dtype=torch.int32)), 32)
    with pytest.raises(ValueError, match="g_idx: given with an AWQ layer"):
        repack_awq(replace(layer.as_awq(), g_idx=torch.zeros(64, dtype=torch.int32)), 32)


@pytest.mark.parametrize("bits", ["int4", "int8", "fp8"])
def test_quantised_weights_are_weights_of_linear(bits: str) -> None:
    int4 = int4_layer(128, 24, 128, has_bias=True)
    eight_bits = (int8_layer if bits == "int8" else fp8_layer)(128, 24, has_bias=True)
    weight: LinearWeight = repack_gptq(int4.as_gptq(), 128) if bits == "int4" else eight_bits
    matrix = int4.matrix().T if bits == "int4" else eight_bits.values.float() * eight_bits.scales[:, None]
    bias = (int4 if bits == "int4" else eight_bits).bias
    assert bias is not None
    x, residual = torch.randn(3, 128), torch.randn(3, 24)
    before = residual.clone()
    expected = x @ matrix.float().T + bias.float() + residual
    # With FP8 weights, tokens are rounded to FP8 too.
    tolerance = 0.05 * float(expected.abs().max()) if bits == "fp8" else 1e-4
    torch.testing.assert_close(linear(x, weight, residual), expected, atol=tolerance, rtol=0)
    assert torch.equal(residual, before)
    assert (weight.in_features, weight.out_features) == (128, 24)


def test_what_the_kernels_cannot_hold_is_not_repacked() -> None:
    numbers, ones = torch.randint(0, 16, (8, 64), dtype=torch.uint8), torch.ones(8, 2)
    for zero in (17.0, -1.0, 8.5):
        kept = NibbleWeight.of_zero_points(numbers, ones, torch.full((8, 2), zero))
        assert kept is not None
        assert repack_nibbles(kept, None, torch.device("cpu")) is None
    minimums = NibbleWeight.of_minimums(numbers, ones.half(), -ones.half())
    assert minimums is not None
    assert repack_nibbles(minimums, None, torch.device("cpu")) is None
