from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quant_cases import CPU, e2m1, fp8_groups_layer, fp8_layer, int4_layer, int8_layer, mxfp4_layer

from naiad_kernels.linear import LinearWeight, linear
from naiad_kernels.linear.quantised import (
    ByteWeight,
    MXFP4Weight,
    ReorderedNibbles,
    W4Weight,
    repack_mxfp4,
    repack_nibbles,
    w4a16_linear,
)
from naiad_kernels.linear.quantised.kept import joined_kept
from naiad_kernels.native.nibbles import NibbleWeight

# Inputs, outputs, inputs of a group; and of a group of the packed weight.
SIZES = [
    (8, 8, -1, 128),
    (64, 16, 32, 32),
    (96, 7, 64, 64),
    (128, 24, 128, 128),
    (160, 8, 128, 128),
    (576, 16, 64, 64),
    (320, 13, -1, 384),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def matrix_of(weight: W4Weight) -> torch.Tensor:
    """Every weight `[out, in]`, exactly: each row of the identity matrix selects one input's."""
    return w4a16_linear(torch.eye(weight.in_features), replace(weight, bias=None)).T


@pytest.mark.parametrize("sizes", SIZES)
def test_numbers_are_repacked_exactly(sizes: tuple[int, int, int, int]) -> None:
    layer = int4_layer(*sizes[:3])
    weight = layer.packed()
    assert torch.equal(matrix_of(weight), layer.matrix())
    assert weight.group_size == sizes[3]
    assert weight.input_order is None


@pytest.mark.parametrize("sizes", [(64, 8, 32), (160, 24, 32), (192, 7, 64), (384, 16, 128)])
def test_numbers_in_any_order_are_repacked_exactly(sizes: tuple[int, int, int]) -> None:
    layer = int4_layer(*sizes).shuffled(torch.randperm(sizes[0]))
    assert torch.equal(layer.reordered().matrix(), layer.matrix())
    weight = layer.packed()
    assert torch.equal(matrix_of(weight), layer.matrix())
    assert weight.group_size == sizes[2]
    assert weight.input_order is not None


def test_the_bias_is_added() -> None:
    layer = int4_layer(64, 8, 32, has_bias=True)
    assert layer.bias is not None
    x = torch.randn(3, 64)
    for each in (layer, layer.shuffled(torch.randperm(64))):
        expected = x @ each.matrix().T + layer.bias.float()
        torch.testing.assert_close(w4a16_linear(x, each.packed()), expected)


@pytest.mark.parametrize("bits", ["int4", "int8", "fp8"])
def test_quantised_weights_are_weights_of_linear(bits: str) -> None:
    int4 = int4_layer(128, 24, 128, has_bias=True)
    eight_bits = (int8_layer if bits == "int8" else fp8_layer)(128, 24, has_bias=True)
    weight: LinearWeight = int4.packed() if bits == "int4" else eight_bits
    matrix = int4.matrix() if bits == "int4" else eight_bits.values.float() * eight_bits.scales[:, None]
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
        assert repack_nibbles(kept, None, CPU) is None
    minimums = NibbleWeight.of_minimums(numbers, ones.half(), -ones.half())
    assert minimums is not None
    assert repack_nibbles(minimums, None, CPU) is None


def test_every_float_of_four_bits_is_repacked_exactly() -> None:
    """Two outputs have all codes with the least exponents and with others."""
    pairs = torch.arange(0, 16, 2, dtype=torch.uint8).repeat(4)
    pairs = pairs | (pairs + 1) << 4
    exponents = torch.tensor([[0, 1], [127, 252]], dtype=torch.uint8)
    weight = MXFP4Weight(torch.stack([pairs, pairs]), exponents)
    values = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64).repeat(4)
    expected = values * 2.0 ** (exponents.double().repeat_interleave(32, 1) - 127)
    assert torch.equal(weight.matrix().double(), expected)
    assert torch.equal(matrix_of(repack_mxfp4(weight, None, CPU)), weight.matrix())


@pytest.mark.parametrize("in_features", [32, 128, 160, 576])
def test_mxfp4_is_repacked_exactly(in_features: int) -> None:
    weight = mxfp4_layer(in_features, 24)
    assert torch.equal(matrix_of(repack_mxfp4(weight, None, CPU)), weight.matrix())


def reordered(in_features: int, out_features: int, order: torch.Tensor) -> ReorderedNibbles:
    return int4_layer(in_features, out_features, 32).shuffled(order).reordered()


def test_groups_of_different_sizes_are_not_sorted() -> None:
    numbers, ones = torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 2)
    uneven = torch.tensor([0] * 33 + [1] * 31)
    assert ReorderedNibbles.of_groups(numbers, ones, ones, uneven) is None


def test_weights_in_one_form_are_joined() -> None:
    order = torch.randperm(64)
    for parts in (
        [fp8_groups_layer(300, 24), fp8_groups_layer(300, 7)],
        [fp8_layer(300, 24), fp8_layer(300, 7)],
        [mxfp4_layer(64, 24), mxfp4_layer(64, 7)],
        [reordered(64, 24, order), reordered(64, 7, order)],
    ):
        joined = joined_kept(parts)
        assert type(joined) is type(parts[0])
        assert torch.equal(joined.matrix(), torch.cat([each.matrix() for each in parts]))


def test_weights_in_different_forms_are_not_joined() -> None:
    groups = fp8_groups_layer(512, 8)
    for other in (
        fp8_groups_layer(512, 8, group_size=256),
        replace(fp8_layer(512, 8), rounds_inputs=True),
        mxfp4_layer(512, 8),
        torch.ones(8, 512),
    ):
        assert joined_kept([groups, other]) is None
    assert joined_kept([reordered(64, 8, order) for order in (torch.arange(64), torch.randperm(64))]) is None


@pytest.mark.parametrize(("outputs", "inputs"), [(range(3, 9), range(128, 290)), (range(16), range(200))])
def test_parts_of_groups_stand_for_the_same_weights(outputs: range, inputs: range) -> None:
    whole = fp8_groups_layer(300, 16)
    part = whole.part(outputs, inputs)
    assert part is not None
    expected = whole.matrix()[outputs.start : outputs.stop, inputs.start : inputs.stop]
    assert torch.equal(part.matrix(), expected)


def test_parts_of_mxfp4_and_of_numbers_in_any_order_stand_for_the_same_weights() -> None:
    mxfp4, numbers = mxfp4_layer(160, 16), reordered(160, 16, torch.randperm(160))
    part = mxfp4.part(range(3, 9), range(32, 128))
    assert part is not None
    assert torch.equal(part.matrix(), mxfp4.matrix()[3:9, 32:128])
    rows = numbers.part(range(3, 9), range(160))
    assert rows is not None
    assert torch.equal(rows.matrix(), numbers.matrix()[3:9])


def test_parts_that_cut_a_group_are_not_kept() -> None:
    whole: ByteWeight = fp8_groups_layer(300, 16)
    assert whole.part(range(16), range(64, 300)) is None
    assert mxfp4_layer(160, 16).part(range(16), range(16, 160)) is None
    assert mxfp4_layer(160, 16).part(range(16), range(48)) is None
    assert reordered(64, 16, torch.randperm(64)).part(range(16), range(32)) is None
