from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernel_interpreter import Interpret
from quant_cases import (
    CPU,
    e2m1,
    fp8_groups_layer,
    fp8_layer,
    int4_layer,
    int8_layer,
    mxfp4_layer,
    rounded_layer,
)

from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.linear.quantised import (
    ByteTokens,
    ByteWeight,
    W4Weight,
    kernel,
    reference,
    repack_mxfp4,
    repack_nibbles,
)
from naiad_kernels.linear.quantised.kernel import w4
from naiad_kernels.linear.quantised.kernel.plan import Plan, Tile, byte_tile, plan_product, w4_tile
from naiad_kernels.linear.quantised.weights import DISTINCT_ROWS
from naiad_kernels.native.nibbles import NibbleWeight

DTYPES = [torch.float16, torch.float32]
# Tokens, inputs, outputs: one of each, ragged tiles of each, two chunks, more rows than one tile.
SIZES = [(1, 8, 8), (1, 576, 136), (5, 136, 200), (17, 256, 128), (33, 520, 8), (70, 128, 72)]
# The same with inputs that are whole groups of 32, or one group.
INT4_SIZES = [(1, 8, 8), (1, 576, 136), (5, 160, 200), (17, 256, 128), (33, 544, 8), (70, 128, 72)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def int4_weight(in_features: int, out_features: int, group_size: int, has_bias: bool = False) -> W4Weight:
    return int4_layer(in_features, out_features, group_size, has_bias).packed()


def mxfp4_weight(in_features: int, out_features: int, exponents: range = range(119, 131)) -> W4Weight:
    bias = torch.randn(out_features).half()
    return repack_mxfp4(mxfp4_layer(in_features, out_features, exponents), bias, CPU)


def fp8_tokens(num_tokens: int, dim: int, by_span: bool = False) -> ByteTokens:
    return reference.quantize_tokens(torch.randn(num_tokens, dim), by_span=by_span)


def in_both_ways(launch: Callable[..., Any], plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """The product by programs that compute all chunks, and by one program for each chunk."""
    assert plan.num_chunks > 1
    return tuple(launch(replace(plan, is_split=is_split)) for is_split in (False, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", INT4_SIZES)
def test_w4a16(interpret: Interpret, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, in_features, out_features = sizes
    x = torch.randn(num_tokens, in_features).to(dtype)
    weight = int4_weight(in_features, out_features, 128, has_bias=True)
    assert_close_to_reference(interpret(kernel.w4a16_linear, x, weight), reference.w4a16_linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_w4a16_in_any_groups(interpret: Interpret, group_size: int, dtype: torch.dtype) -> None:
    """With 416 inputs the last span has padded groups, and the last groups of 64 and of 128 are short."""
    x, weight = torch.randn(3, 416).to(dtype), int4_weight(416, 72, group_size)
    assert_close_to_reference(interpret(kernel.w4a16_linear, x, weight), reference.w4a16_linear(x, weight))


def test_w4a16_with_act_order(interpret: Interpret) -> None:
    layer = int4_layer(192, 40, 64).shuffled(torch.randperm(192))
    x = torch.randn(4, 192)
    actual = interpret(kernel.w4a16_linear, x, layer.packed())
    assert_close_to_reference(actual, x @ layer.matrix().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, 136, 200), (33, 520, 8)])
def test_w4a16_of_a_rounded_weight(
    interpret: Interpret, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The last group of 32 inputs has only 8."""
    num_tokens, in_features, out_features = sizes
    x, weight = torch.randn(num_tokens, in_features).to(dtype), rounded_layer(in_features, out_features)
    assert_close_to_reference(interpret(kernel.w4a16_linear, x, weight), reference.w4a16_linear(x, weight))


@pytest.mark.parametrize(
    ("in_features", "group_size", "found"),
    [(416, 32, 32), (384, 64, 64), (384, 96, 32), (384, 128, 128), (416, 416, 512), (40, 40, 128)],
)
def test_w4a16_of_numbers_that_a_reader_has_kept(
    interpret: Interpret, in_features: int, group_size: int, found: int
) -> None:
    """Groups that share scale and zero point are one; 33 outputs are no whole tile."""
    numbers = torch.randint(0, 16, (33, in_features), dtype=torch.uint8)
    shape = (33, in_features // group_size)
    scales, zeros = (torch.rand(shape) + 0.125).half().float(), torch.randint(0, 17, shape).float()
    kept = NibbleWeight.of_zero_points(numbers, scales, zeros)
    assert kept is not None
    weight = repack_nibbles(kept, None, CPU)
    assert weight is not None
    assert weight.group_size == found
    x = torch.randn(3, in_features)
    assert_close_to_reference(interpret(kernel.w4a16_linear, x, weight), x @ kept.matrix().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 32, 8), (1, 576, 136), (5, 160, 200), (17, 256, 128), (70, 96, 72)])
def test_mxfp4(interpret: Interpret, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, in_features, out_features = sizes
    x, weight = torch.randn(num_tokens, in_features).to(dtype), mxfp4_weight(in_features, out_features)
    assert_close_to_reference(interpret(kernel.w4a16_linear, x, weight), reference.w4a16_linear(x, weight))


def test_mxfp4_beyond_what_a_float16_holds(interpret: Interpret) -> None:
    """Weights of up to 6 · 2²⁰ multiply small inputs of 16 bits."""
    x, weight = (torch.randn(3, 256) / 2**13).half(), mxfp4_weight(256, 40, range(140, 148))
    assert_close_to_reference(interpret(kernel.w4a16_linear, x, weight), reference.w4a16_linear(x, weight))


@pytest.mark.parametrize(("exponent", "size"), [(0, 2.0**110), (1, 2.0**110), (252, 2.0**-120)])
def test_mxfp4_with_the_least_and_the_greatest_exponents(
    interpret: Interpret, exponent: int, size: float
) -> None:
    x, weight = torch.randn(3, 64) * size, mxfp4_weight(64, 24, range(exponent, exponent + 1))
    weight = replace(weight, bias=None)
    assert_close_to_reference(interpret(kernel.w4a16_linear, x, weight), reference.w4a16_linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_w8a16(interpret: Interpret, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, in_features, out_features = sizes
    x = torch.randn(num_tokens, in_features).to(dtype)
    weight = int8_layer(in_features, out_features, has_bias=True)
    assert_close_to_reference(interpret(kernel.w8a16_linear, x, weight), reference.w8a16_linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*SIZES, (2, 77, 33)])
def test_fp8(interpret: Interpret, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, in_features, out_features = sizes
    tokens = fp8_tokens(num_tokens, in_features)
    weight = fp8_layer(in_features, out_features, has_bias=True)
    assert_close_to_reference(
        interpret(kernel.w8a8_linear, tokens, weight, dtype), reference.w8a8_linear(tokens, weight, dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [128, 256])
@pytest.mark.parametrize("sizes", [*SIZES, (2, 77, 33), (3, 700, 24)])
def test_fp8_in_groups(
    interpret: Interpret, sizes: tuple[int, int, int], group_size: int, dtype: torch.dtype
) -> None:
    num_tokens, in_features, out_features = sizes
    tokens = fp8_tokens(num_tokens, in_features, by_span=True)
    weight = fp8_groups_layer(in_features, out_features, True, group_size)
    assert_close_to_reference(
        interpret(kernel.w8a8_linear, tokens, weight, dtype), reference.w8a8_linear(tokens, weight, dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*SIZES, (2, 77, 33)])
def test_w8a8(interpret: Interpret, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, in_features, out_features = sizes
    tokens = reference.quantize_tokens(torch.randn(num_tokens, in_features), torch.int8)
    weight = int8_layer(in_features, out_features, has_bias=True)
    assert_close_to_reference(
        interpret(kernel.w8a8_linear, tokens, weight, dtype), reference.w8a8_linear(tokens, weight, dtype)
    )


def test_sums_of_int8_are_exact(interpret: Interpret) -> None:
    """Products of the largest numbers add up to more than a float32 holds."""
    values = torch.full((2, 5000), -128, dtype=torch.int8)
    values[1, ::7] = 127
    tokens, weight = ByteTokens(values, torch.ones(2)), ByteWeight(values.clone(), torch.ones(2))
    plan = Plan(byte_tile(2, 1, 90), 5120, 1, is_split=False)
    wide = values.long()
    exact = (wide @ wide.T).float()
    assert torch.equal(interpret(kernel.w8a8_linear, tokens, weight, torch.float32, plan), exact)


def test_no_tokens_no_rows(interpret: Interpret) -> None:
    x = torch.empty(0, 128)
    assert interpret(kernel.w4a16_linear, x, int4_weight(128, 24, 64)).shape == (0, 24)
    assert interpret(kernel.w8a16_linear, x, int8_layer(128, 24)).shape == (0, 24)
    tokens = interpret(kernel.quantize_tokens, x)
    assert interpret(kernel.w8a8_linear, tokens, fp8_layer(128, 24), torch.float16).shape == (0, 24)
    tokens = interpret(kernel.quantize_tokens, x, torch.float8_e4m3fn, True)
    assert interpret(kernel.w8a8_linear, tokens, fp8_groups_layer(128, 24), torch.float16).shape == (0, 24)


def test_rows_of_a_wider_tensor(interpret: Interpret) -> None:
    wide = torch.full((4, 300), torch.nan)
    wide[:, 10:146] = torch.randn(4, 136)
    x = wide[:, 10:146]
    for launch, weight in (
        (kernel.w4a16_linear, rounded_layer(136, 40)),
        (kernel.w8a16_linear, int8_layer(136, 40)),
    ):
        assert torch.equal(interpret(launch, x, weight), interpret(launch, x.contiguous(), weight))


def test_rows_beyond_32_bits_are_reached(interpret: Interpret) -> None:
    x, weight = torch.randn(2, 136).half(), rounded_layer(136, 40)
    actual = interpret(_with_rows_far_apart, x, weight)
    assert torch.equal(actual, interpret(kernel.w4a16_linear, x, weight))


def _with_rows_far_apart(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    # Memory that nobody touches is not there, so it must not be filled.
    torch.use_deterministic_algorithms(False)
    far = torch.empty(len(x), 2**31 + 8, dtype=x.dtype)[:, : x.shape[1]]
    torch.use_deterministic_algorithms(True)
    return kernel.w4a16_linear(far.copy_(x), weight)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 0x4300), (torch.float16, 0x6400)])
def test_floats_around_codes_differ_exactly(dtype: torch.dtype, bits: int) -> None:
    """The interpreter has no bfloat16, so the kernel's bit operations are repeated here."""
    codes, zeros = torch.arange(16, dtype=torch.int16)[:, None], torch.arange(17, dtype=torch.int16)
    assert bits in (w4._BFLOAT16_BITS.value, w4._FLOAT16_BITS.value)
    difference = (codes | bits).view(dtype) - (zeros | bits).view(dtype)
    assert torch.equal(difference.float(), (codes - zeros).float())


@pytest.mark.parametrize(
    ("dtype", "shift", "factor"),
    [
        (torch.bfloat16, w4._BFLOAT16_SHIFT, w4._BFLOAT16_FACTOR),
        (torch.float16, w4._FLOAT16_SHIFT, w4._FLOAT16_FACTOR),
    ],
)
def test_floats_of_four_bits_are_converted_exactly(dtype: torch.dtype, shift: Any, factor: Any) -> None:
    """As above; the factor is a float of the dtype."""
    codes = torch.arange(16, dtype=torch.int32)
    bits = (codes & 8) << 12 | (codes & 7) << shift.value
    floats = bits.to(torch.int16).view(dtype) * torch.tensor(factor.value, dtype=dtype)
    assert floats.tolist() == [e2m1(code) for code in range(16)]


@pytest.mark.parametrize("num_tokens", [1, 19])
def test_splitting_changes_no_bit(interpret: Interpret, num_tokens: int) -> None:
    """Slabs hold NaN at first, so the test also shows that each is written completely before it is read."""
    in_features, out_features = 1090, 72
    x = torch.randn(num_tokens, in_features).half()
    int4, int8 = rounded_layer(in_features, out_features), int8_layer(in_features, out_features, True)
    plan = plan_product(w4_tile(num_tokens, 2, 90), num_tokens, in_features, out_features)
    whole, split = in_both_ways(lambda how: interpret(kernel.w4a16_linear, x, int4, how), plan)
    assert torch.equal(whole, split)
    plan = plan_product(byte_tile(num_tokens, 2, 90), num_tokens, in_features, out_features)
    whole, split = in_both_ways(lambda how: interpret(kernel.w8a16_linear, x, int8, how), plan)
    assert torch.equal(whole, split)
    tokens, fp8 = fp8_tokens(num_tokens, in_features), fp8_layer(in_features, out_features, True)
    whole, split = in_both_ways(
        lambda how: interpret(kernel.w8a8_linear, tokens, fp8, torch.float16, how), plan
    )
    assert torch.equal(whole, split)
    tokens = reference.quantize_tokens(x, torch.int8)
    whole, split = in_both_ways(
        lambda how: interpret(kernel.w8a8_linear, tokens, int8, torch.float16, how), plan
    )
    assert torch.equal(whole, split)


@pytest.mark.parametrize("num_tokens", [1, 19])
def test_splitting_groups_changes_no_bit(interpret: Interpret, num_tokens: int) -> None:
    tokens, fp8 = fp8_tokens(num_tokens, 1090, by_span=True), fp8_groups_layer(1090, 72, True)
    plan = plan_product(byte_tile(num_tokens, 1, 90, has_groups=True), num_tokens, 1090, 72)
    whole, split = in_both_ways(
        lambda how: interpret(kernel.w8a8_linear, tokens, fp8, torch.float16, how), plan
    )
    assert torch.equal(whole, split)
    x, mxfp4 = torch.randn(num_tokens, 1088).half(), mxfp4_weight(1088, 72)
    plan = plan_product(w4_tile(num_tokens, 2, 90), num_tokens, 1088, 72)
    whole, split = in_both_ways(lambda how: interpret(kernel.w4a16_linear, x, mxfp4, how), plan)
    assert torch.equal(whole, split)


def test_tiles_in_groups_cover_the_output(interpret: Interpret) -> None:
    """Nine tiles of rows are one more than a group of programs has."""
    x, weight = torch.randn(16 * 8 + 3, 32).half(), int8_layer(32, 40)
    plan = Plan(Tile(16, 16, 32, 4, 2), 128, 1, is_split=False)
    actual = interpret(kernel.w8a16_linear, x, weight, plan)
    assert_close_to_reference(actual, reference.w8a16_linear(x, weight))


def test_a_nan_stays_in_its_own_row(interpret: Interpret) -> None:
    x = torch.randn(5, 256)
    x[2, 100] = torch.nan
    results = [
        interpret(kernel.w4a16_linear, x, int4_weight(256, 24, 128)),
        interpret(kernel.w4a16_linear, x, mxfp4_weight(256, 24)),
        interpret(kernel.w8a16_linear, x, int8_layer(256, 24)),
        interpret(
            kernel.w8a8_linear,
            interpret(kernel.quantize_tokens, x, torch.float8_e4m3fn, True),
            fp8_groups_layer(256, 24),
            torch.float32,
        ),
        *(
            interpret(kernel.w8a8_linear, interpret(kernel.quantize_tokens, x, code), layer, torch.float32)
            for code, layer in ((torch.float8_e4m3fn, fp8_layer(256, 24)), (torch.int8, int8_layer(256, 24)))
        ),
    ]
    for result in results:
        assert result[2].isnan().all()
        assert result[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("by_span", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 576), (2, 1030)])
def test_quantized_tokens(interpret: Interpret, shape: tuple[int, int], by_span: bool) -> None:
    x = torch.randn(shape) * 100
    actual = interpret(kernel.quantize_tokens, x, torch.float8_e4m3fn, by_span)
    expected = reference.quantize_tokens(x, by_span=by_span)
    torch.testing.assert_close(actual.scales, expected.scales)
    values, rounded = actual.values.float(), expected.values.float()
    # The interpreter loses the carry when a value is rounded up to the next power of two.
    scales = expected.scales if by_span else expected.scales[None]
    exact = x.float() / scales.T.repeat_interleave(128 if by_span else shape[1], 1)[:, : shape[1]]
    carries = rounded.frexp().exponent != exact.frexp().exponent
    assert carries.float().mean() < 0.1
    assert torch.equal(values[~carries], rounded[~carries])


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 576), (2, 1030)])
def test_tokens_in_int8(interpret: Interpret, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 100
    actual, expected = (
        interpret(kernel.quantize_tokens, x, torch.int8),
        reference.quantize_tokens(x, torch.int8),
    )
    assert torch.equal(actual.values, expected.values)
    torch.testing.assert_close(actual.scales, expected.scales)
    assert (actual.values.float() * actual.scales[:, None] - x).abs().max() <= 0.51 * actual.scales.max()
    assert bool((actual.values.abs().amax(1) == 127).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp8_value_is_kept(interpret: Interpret, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    every = codes[~codes.isnan()].float()[None]
    actual = interpret(kernel.quantize_tokens, (every / 1024).to(dtype))
    assert torch.equal(actual.values.float(), every)
    assert actual.scales.item() == 1 / 1024


def test_spans_of_a_token_have_scales_of_their_own(interpret: Interpret) -> None:
    x = torch.randn(2, 300)
    x[0, :128] *= 1e6
    x[1, 128:256] = 0
    x[1, 299] = torch.inf
    for tokens in (
        reference.quantize_tokens(x, by_span=True),
        interpret(kernel.quantize_tokens, x, torch.float8_e4m3fn, True),
    ):
        assert tokens.scales.shape == (3, 2)
        assert tokens.scales[1, 1] == 0
        assert tokens.scales[2].isnan().tolist() == [False, True]
        largest = torch.stack([part.abs().max() for part in x[0].split(128)])
        torch.testing.assert_close(tokens.scales[:, 0], largest / 448)


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan, -torch.inf])
def test_tokens_without_a_scale(interpret: Interpret, value: float, code: torch.dtype) -> None:
    x = torch.stack([torch.randn(40), torch.full((40,), value)])
    expected = reference.quantize_tokens(x, code).scales
    assert expected[1].isnan() if value else expected[1] == 0
    actual = interpret(kernel.quantize_tokens, x, code)
    torch.testing.assert_close(actual.scales, expected, equal_nan=True)
    if not value:
        assert not actual.values[1].float().any()


@pytest.mark.parametrize("layer", [(4096, 4096), (4096, 28672), (14336, 4096), (576, 576), (100, 8)])
def test_a_layer_is_cut_alike_for_any_tokens(layer: tuple[int, int]) -> None:
    plans = [
        plan_product(tile, num_rows, *layer)
        for num_rows in (1, 16, 17, 64, 100, 5000)
        for tile in (w4_tile(num_rows, 2, 90), *(byte_tile(num_rows, 1, 90, each) for each in (False, True)))
    ]
    assert len({(plan.chunk_size, plan.num_chunks) for plan in plans}) == 1
    assert all(plan.chunk_size % 128 == 0 for plan in plans)
    assert plans[0].chunk_size * (plans[0].num_chunks - 1) < layer[0]
    assert not plans[-1].is_split


def test_one_token_of_a_large_layer_is_spread_over_programs() -> None:
    plan = plan_product(w4_tile(1, 2, 90), 1, 4096, 4096)
    assert plan.is_split
    assert plan.num_chunks * plan.num_tiles(1, 4096) == 256


def test_weights_know_their_sizes() -> None:
    weights: list[W4Weight | ByteWeight] = [rounded_layer(136, 40), int8_layer(136, 40)]
    assert [(weight.in_features, weight.out_features) for weight in weights] == [(136, 40)] * 2


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tile_of", [w4_tile, byte_tile, partial(byte_tile, has_groups=True)])
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("most", [65, 300, 8192])
def test_few_numbers_of_tokens_launch_every_variant(
    tile_of: Callable[[int, int, int], Tile], element_bytes: int, capability: int, most: int
) -> None:
    for in_features, out_features in ((576, 960), (4096, 4096), (14336, 4096)):

        def variant(rows: int, sizes: tuple[int, int] = (in_features, out_features)) -> tuple[Tile, bool]:
            tile = tile_of(rows, element_bytes, capability)
            return tile, plan_product(tile, rows, *sizes).is_split

        launched = {variant(rows) for rows in (*DISTINCT_ROWS, most)}
        assert {variant(rows) for rows in range(1, most + 1)} == launched
