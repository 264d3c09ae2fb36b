"""Products with weights: with a fixed order of summation, with four and eight bits, and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from perf.kernels.cases import Case, Rival, equals, num_bytes
from perf.kernels.sizes import Sizes
from torch.nn import functional as F

from naiad_kernels.linear import LoadOptions, linear, prepare_linear
from naiad_kernels.linear.quantised import (
    ByteWeight,
    MXFP4Weight,
    W4Weight,
    quantize_tokens,
    reference,
    repack_mxfp4,
    w4a16_linear,
    w8a8_linear,
    w8a16_linear,
)
from naiad_kernels.linear.quantised.kept import EXPONENT_INPUTS
from naiad_kernels.linear.quantised.weights import SPAN, WORDS_PER_SPAN
from naiad_kernels.lora import lora_expand, lora_shrink, plan_lora
from naiad_kernels.lora import reference as lora_reference

_GROUP_SIZE, _LARGEST_FP8 = 128, 448.0
_NUM_ADAPTERS, _RANK = 8, 16


def product_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One token with every layer, more with the widest layer, the square product, and adapters."""
    has_fp8 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)
    steps = [(1, name) for name in sizes.layers]
    steps += [(num_tokens, "gate_up") for num_tokens in sizes.product_tokens if num_tokens > 1]
    for num_tokens, name in steps:
        num_in, num_out = sizes.layers[name]
        x = _random(sizes, device, num_tokens, num_in)
        cublas = _cublas(x, _random(sizes, device, num_out, num_in))
        shape = f"{name} {num_tokens} × {num_in} × {num_out}"
        yield _fixed_order(shape, x, _random(sizes, device, num_out, num_in))
        yield _four_bits(shape, x, num_out, cublas)
        yield _mxfp4(shape, x, num_out, cublas)
        yield _eight_bits(shape, x, num_out, cublas)
        yield _int8(shape, x, num_out, cublas)
        if has_fp8:
            yield _fp8(shape, x, num_out, "")
            yield _fp8_in_groups(shape, x, num_out)
    if has_fp8:
        side = sizes.product_side
        square = _random(sizes, device, side, side)
        yield _fp8(f"{side} × {side} × {side}", square, side, "FP8 product" if square.is_cuda else "")
    for num_tokens in sizes.num_tokens:
        yield _adapters(sizes, device, num_tokens)


def _random(sizes: Sizes, device: torch.device, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=sizes.dtype)


def _cublas(x: torch.Tensor, matrix: torch.Tensor) -> dict[str, Rival]:
    """The library's product in the activations' dtype, with other weights."""
    return {"cuBLAS" if x.is_cuda else "torch": Rival(lambda: F.linear(x, matrix), False)}


def _fixed_order(shape: str, x: torch.Tensor, matrix: torch.Tensor) -> Case:
    # There is no fixed-order method on a CPU; the rehearsal uses the CPU's own.
    weight = prepare_linear(matrix, options=LoadOptions(batch_invariant=x.is_cuda))
    return Case(
        op="linear, fixed order",
        shape=shape,
        run=lambda: linear(x, weight),
        check=equals("linear", lambda: (x.float() @ matrix.float().T).to(x.dtype)),
        rivals={"cuBLAS" if x.is_cuda else "torch": Rival(lambda: F.linear(x, matrix))},
        num_bytes=num_bytes(x, matrix) + x.element_size() * len(x) * len(matrix),
        flops=2 * x.numel() * len(matrix),
    )


def _four_bits(shape: str, x: torch.Tensor, num_out: int, rivals: dict[str, Rival]) -> Case:
    num_in, device = x.shape[1], x.device
    num_spans = -(-num_in // SPAN)
    groups = (num_spans * SPAN // _GROUP_SIZE, num_out)
    zeros = torch.randint(0, 16, groups, dtype=torch.int16, device=device)
    weight = W4Weight(
        words=torch.randint(
            -(2**31), 2**31, (num_spans, num_out, WORDS_PER_SPAN), dtype=torch.int32, device=device
        ),
        scales=(torch.rand(groups, device=device) / 100 + 0.001).half(),
        zeros=zeros,
        in_features=num_in,
        group_size=_GROUP_SIZE,
        input_order=None,
        bias=None,
    )
    return Case(
        op="w4a16_linear",
        shape=shape,
        run=lambda: w4a16_linear(x, weight),
        check=equals("w4a16_linear", lambda: reference.w4a16_linear(x, weight)),
        rivals=rivals,
        num_bytes=num_bytes(x, weight.words, weight.scales, zeros) + x.element_size() * len(x) * num_out,
        flops=2 * x.numel() * num_out,
        target="four-bit weights" if len(x) == 1 else "",
    )


def _mxfp4(shape: str, x: torch.Tensor, num_out: int, rivals: dict[str, Rival]) -> Case:
    num_groups = -(-x.shape[1] // EXPONENT_INPUTS)
    stored = MXFP4Weight(
        torch.randint(0, 256, (num_out, num_groups * EXPONENT_INPUTS // 2), dtype=torch.uint8),
        torch.randint(119, 125, (num_out, num_groups), dtype=torch.uint8),
    )
    weight = replace(repack_mxfp4(stored, None, x.device), in_features=x.shape[1])
    return Case(
        op="w4a16_linear, MXFP4",
        shape=shape,
        run=lambda: w4a16_linear(x, weight),
        check=equals("w4a16_linear", lambda: reference.w4a16_linear(x, weight)),
        rivals=rivals,
        num_bytes=num_bytes(x, weight.words, weight.scales) + x.element_size() * len(x) * num_out,
        flops=2 * x.numel() * num_out,
    )


def _eight_bits(shape: str, x: torch.Tensor, num_out: int, rivals: dict[str, Rival]) -> Case:
    values = torch.randint(-128, 128, (num_out, x.shape[1]), dtype=torch.int8, device=x.device)
    weight = ByteWeight(values, torch.rand(num_out, device=x.device) / 100 + 0.001)
    return Case(
        op="w8a16_linear",
        shape=shape,
        run=lambda: w8a16_linear(x, weight),
        check=equals("w8a16_linear", lambda: reference.w8a16_linear(x, weight)),
        rivals=rivals,
        num_bytes=num_bytes(x, values) + x.element_size() * len(x) * num_out,
        flops=2 * x.numel() * num_out,
    )


def _int8(shape: str, x: torch.Tensor, num_out: int, rivals: dict[str, Rival]) -> Case:
    values = torch.randint(-128, 128, (num_out, x.shape[1]), dtype=torch.int8, device=x.device)
    weight = ByteWeight(values, torch.rand(num_out, device=x.device) / 100 + 0.001)
    tokens = quantize_tokens(x, torch.int8)
    return Case(
        op="w8a8_linear, int8",
        shape=shape,
        run=lambda: w8a8_linear(tokens, weight, x.dtype),
        check=equals("w8a8_linear", lambda: reference.w8a8_linear(tokens, weight, x.dtype)),
        rivals=rivals,
        num_bytes=num_bytes(tokens.values, values) + x.element_size() * len(x) * num_out,
        flops=2 * x.numel() * num_out,
    )


def _fp8(shape: str, x: torch.Tensor, num_out: int, target: str) -> Case:
    values = torch.randn(num_out, x.shape[1], device=x.device).mul(50).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    scales = torch.rand(num_out, device=x.device) / 50 + 0.001
    weight = ByteWeight(values.to(torch.float8_e4m3fn), scales)
    tokens = quantize_tokens(x)
    rivals = {}

    def scaled() -> torch.Tensor:
        row_scales, column_scales = tokens.scales[:, None], scales[None]
        return torch._scaled_mm(
            tokens.values, weight.values.T, scale_a=row_scales, scale_b=column_scales, out_dtype=x.dtype
        )

    # cuBLAS requires sizes in multiples of 16.
    if x.is_cuda and len(x) % 16 == 0:
        rivals["cuBLAS"] = Rival(scaled)
    return Case(
        op="w8a8_linear, FP8",
        shape=shape,
        run=lambda: w8a8_linear(tokens, weight, x.dtype),
        check=equals("w8a8_linear", lambda: reference.w8a8_linear(tokens, weight, x.dtype)),
        rivals=rivals,
        num_bytes=num_bytes(tokens.values, weight.values) + x.element_size() * len(x) * num_out,
        flops=2 * x.numel() * num_out,
        target=target,
    )


def _fp8_in_groups(shape: str, x: torch.Tensor, num_out: int) -> Case:
    values = torch.randn(num_out, x.shape[1], device=x.device).mul(50).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    scales = torch.rand(-(-x.shape[1] // SPAN), num_out, device=x.device) / 50 + 0.001
    weight = ByteWeight(values.to(torch.float8_e4m3fn), scales, group_size=SPAN)
    tokens = quantize_tokens(x, by_span=True)
    return Case(
        op="w8a8_linear, FP8 in groups",
        shape=shape,
        run=lambda: w8a8_linear(tokens, weight, x.dtype),
        check=equals("w8a8_linear", lambda: reference.w8a8_linear(tokens, weight, x.dtype)),
        num_bytes=num_bytes(tokens.values, weight.values, scales) + x.element_size() * len(x) * num_out,
        flops=2 * x.numel() * num_out,
    )


def _adapters(sizes: Sizes, device: torch.device, num_tokens: int) -> Case:
    num_heads, num_kv_heads, head_dim = sizes.heads
    slices = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    x = _random(sizes, device, num_tokens, sizes.hidden_size)
    down = _random(sizes, device, _NUM_ADAPTERS * 3 * _RANK, sizes.hidden_size) / sizes.hidden_size**0.5
    down = down.view(_NUM_ADAPTERS, 3, _RANK, sizes.hidden_size)
    up = _random(sizes, device, _NUM_ADAPTERS * sum(slices), _RANK).view(_NUM_ADAPTERS, -1, _RANK)
    adapter_ids = torch.arange(num_tokens, device=device) % _NUM_ADAPTERS
    plan = plan_lora(adapter_ids, _NUM_ADAPTERS)
    out = torch.zeros(num_tokens, sum(slices), device=device, dtype=sizes.dtype)

    def run() -> torch.Tensor:
        lora_expand(out, lora_shrink(x, down, plan), up, slices, plan)
        return out

    def expected() -> torch.Tensor:
        result = torch.zeros_like(out)
        lora_reference.lora_expand(result, lora_reference.lora_shrink(x, down, plan), up, slices, plan)
        return result

    num_used = min(num_tokens, _NUM_ADAPTERS)
    used_bytes = num_bytes(down, up) * num_used // _NUM_ADAPTERS
    return Case(
        op="lora_shrink, lora_expand",
        shape=f"{num_tokens} × {sizes.hidden_size} × {sum(slices)}, {num_used} of rank {_RANK}",
        run=run,
        check=equals("lora", expected),
        num_bytes=num_bytes(x) + used_bytes + 2 * num_bytes(out),
        flops=2 * num_tokens * _RANK * (3 * sizes.hidden_size + sum(slices)),
    )
