from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quant_cases import Int4Layer, e2m1, fp8_groups_layer, fp8_layer, int4_layer, int8_layer, mxfp4_layer

from naiad_kernels.linear import LinearWeight, linear
from naiad_kernels.linear.quantised import (
    ByteWeight,
    Int4Tensors,
    MXFP4Weight,
    ReorderedNibbles,
    W4Weight,
    repack_awq,
    repack_gptq,
    repack_mxfp4,
    repack_nibbles,
    repack_reordered,
    w4a16_linear,
)
from naiad_kernels.linear.quantised.kept import joined_kept
from naiad_kernels.native.nibbles import NibbleWeight

CPU = torch.device("cpu")
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
    assert torch.equal(matrix_of(repack_mxfp4(weight, None, CPU)).T, weight.matrix())


@pytest.mark.parametrize("in_features", [32, 128, 160, 576])
def test_mxfp4_is_repacked_exactly(in_features: int) -> None:
    weight = mxfp4_layer(in_features, 24)
    assert torch.equal(matrix_of(repack_mxfp4(weight, None, CPU)).T, weight.matrix())


def reordered(in_features: int, out_features: int, order: torch.Tensor) -> ReorderedNibbles:
    numbers = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    shape = (out_features, in_features // 32)
    scales, zeros = (torch.rand(shape) + 0.125).half().float(), torch.randint(0, 17, shape).float()
    group_ids = (torch.arange(in_features) // 32)[order]
    found = ReorderedNibbles.of_groups(numbers, scales, zeros, group_ids)
    assert found is not None
    assert torch.equal(found.matrix(), (numbers - zeros[:, group_ids]) * scales[:, group_ids])
    return found


def test_numbers_in_any_order_are_repacked_exactly() -> None:
    weight = reordered(160, 24, torch.randperm(160))
    packed = repack_reordered(weight, None, CPU)
    assert packed is not None
    assert torch.equal(matrix_of(packed).T, weight.matrix())


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
