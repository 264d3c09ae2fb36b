from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from gpu_cases import DTYPES, GPU, captured, needs_float8
from quant_cases import (
    CPU,
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
    quantize_tokens,
    reference,
    repack_mxfp4,
    w4a16_linear,
    w8a8_linear,
    w8a16_linear,
)

pytestmark = pytest.mark.gpu

NUM_TOKENS = [1, 7, 16, 17, 50, 300]
LAYERS = [(4096, 512), (1000, 136), (576, 1536)]
# The same with inputs that are whole groups of 32.
FOUR_BIT_LAYERS = [(4096, 512), (992, 136), (576, 1536)]
Parts = TypeVar("Parts", W4Weight, ByteWeight, ByteTokens)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_gpu(parts: Parts) -> Parts:
    """The same tensors on the GPU."""
    fields = {name: getattr(parts, name) for name in parts.__dataclass_fields__}
    return replace(parts, **{n: v.to(GPU) for n, v in fields.items() if isinstance(v, torch.Tensor)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("layer", FOUR_BIT_LAYERS)
def test_w4a16(layer: tuple[int, int], group_size: int, num_tokens: int, dtype: torch.dtype) -> None:
    weight = int4_layer(*layer, group_size, has_bias=True).packed()
    x = torch.randn(num_tokens, layer[0]).to(dtype)
    expected = reference.w4a16_linear(x, weight)
    assert_close_to_reference(w4a16_linear(x.to(GPU), on_gpu(weight)).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_w4a16_of_inputs_that_are_no_whole_groups(num_tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, 1000).to(dtype)
    for weight in (rounded_layer(1000, 136), int4_layer(1000, 136, -1, has_bias=True).packed()):
        expected = reference.w4a16_linear(x, weight)
        assert_close_to_reference(w4a16_linear(x.to(GPU), on_gpu(weight)).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("layer", FOUR_BIT_LAYERS)
def test_mxfp4(layer: tuple[int, int], num_tokens: int, dtype: torch.dtype) -> None:
    weight = repack_mxfp4(mxfp4_layer(*layer), torch.randn(layer[1]), CPU)
    x = torch.randn(num_tokens, layer[0]).to(dtype)
    expected = reference.w4a16_linear(x, weight)
    assert_close_to_reference(w4a16_linear(x.to(GPU), on_gpu(weight)).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_of_four_bits_is_converted_exactly(dtype: torch.dtype) -> None:
    """The conversion goes through subnormal numbers, which must not be flushed."""
    weight = repack_mxfp4(mxfp4_layer(128, 64, range(127, 128)), None, CPU)
    x = torch.eye(128).to(dtype)
    assert torch.equal(w4a16_linear(x.to(GPU), on_gpu(weight)).cpu(), reference.w4a16_linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("layer", LAYERS)
def test_w8a16(layer: tuple[int, int], num_tokens: int, dtype: torch.dtype) -> None:
    weight = int8_layer(*layer, has_bias=True)
    x = torch.randn(num_tokens, layer[0]).to(dtype)
    expected = reference.w8a16_linear(x, weight)
    assert_close_to_reference(w8a16_linear(x.to(GPU), on_gpu(weight)).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("layer", LAYERS)
def test_w8a8(layer: tuple[int, int], num_tokens: int, dtype: torch.dtype) -> None:
    weight = int8_layer(*layer, has_bias=True)
    x = torch.randn(num_tokens, layer[0]).to(dtype)
    tokens = reference.quantize_tokens(x, torch.int8)
    expected = reference.w8a8_linear(tokens, weight, dtype)
    assert_close_to_reference(w8a8_linear(on_gpu(tokens), on_gpu(weight), dtype).cpu(), expected)
    found = quantize_tokens(x.to(GPU), torch.int8)
    # A quotient that lies between two numbers may be rounded to either.
    assert (found.values.cpu().int() - tokens.values.int()).abs().max() <= 1
    torch.testing.assert_close(found.scales.cpu(), tokens.scales)


@needs_float8
@pytest.mark.parametrize("by_span", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("layer", LAYERS)
def test_fp8(layer: tuple[int, int], num_tokens: int, dtype: torch.dtype, by_span: bool) -> None:
    weight = (fp8_groups_layer if by_span else fp8_layer)(*layer, has_bias=True)
    tokens = reference.quantize_tokens(torch.randn(num_tokens, layer[0]), by_span=by_span)
    expected = reference.w8a8_linear(tokens, weight, dtype)
    actual = w8a8_linear(on_gpu(tokens), on_gpu(weight), dtype)
    if dtype == torch.float32:
        # Hopper's matrix unit adds FP8 products with fewer bits than a float32 has.
        actual, expected = actual.half(), expected.half()
    assert_close_to_reference(actual.cpu(), expected)


@needs_float8
@pytest.mark.parametrize("by_span", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_quantized_tokens(num_tokens: int, dtype: torch.dtype, by_span: bool) -> None:
    x = (torch.randn(num_tokens, 4096) * 100).to(dtype)
    actual = quantize_tokens(x.to(GPU), by_span=by_span)
    expected = reference.quantize_tokens(x, by_span=by_span)
    torch.testing.assert_close(actual.scales.cpu(), expected.scales)
    # A division may differ in its last bit, so a value halfway between two codes may be rounded to either.
    differ = actual.values.cpu().float() != expected.values.float()
    assert differ.float().mean() < 1e-3


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_product_is_the_same_every_time(num_tokens: int) -> None:
    weight = on_gpu(int4_layer(4096, 512, 128).packed())
    x = torch.randn(num_tokens, 4096).to(torch.bfloat16).to(GPU)
    first = w4a16_linear(x, weight)
    assert all(torch.equal(w4a16_linear(x, weight), first) for _ in range(20))


@needs_float8
def test_a_captured_fp8_product_serves_other_activations() -> None:
    x, weight = torch.randn(4, 1024).bfloat16().to(GPU), on_gpu(fp8_layer(1024, 256))

    def product() -> torch.Tensor:
        return w8a8_linear(quantize_tokens(x), weight, torch.bfloat16)

    graph, out = captured(product)
    x.normal_()
    graph.replay()
    assert torch.equal(out, product())


def test_a_captured_product_serves_other_activations() -> None:
    weight = on_gpu(int4_layer(1024, 256, 128).packed())
    x = torch.randn(4, 1024).half().to(GPU)
    graph, out = captured(lambda: w4a16_linear(x, weight))
    x.normal_()
    graph.replay()
    assert torch.equal(out, w4a16_linear(x, weight))
