"""The launches of linear layers with quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from perf.compile_gate.served.shapes import ServedShape

from naiad_kernels.linear.quantised import ByteWeight, W4Weight
from naiad_kernels.linear.quantised import kernel as quant_kernel
from naiad_kernels.linear.quantised.kept import EXPONENT_INPUTS
from naiad_kernels.linear.quantised.weights import SPAN, WORDS_PER_SPAN


def quantised_launch(shape: ServedShape, num_tokens: int, group_sizes: Sequence[int]) -> Callable[[], object]:
    """A layer of this shape with each kind of weights; four-bit weights in groups of each of these sizes."""
    dim, is_wide = shape.hidden_size, shape.dtype == torch.float32
    x = torch.empty(num_tokens, dim, dtype=shape.dtype)
    int4 = [_int4_weight(dim, group_size) for group_size in group_sizes]
    int4.append(_mxfp4_weight(dim))
    int8, fp8 = (
        ByteWeight(torch.empty(dim, dim, dtype=dtype), torch.empty(dim))
        for dtype in (torch.int8, torch.float8_e4m3fn)
    )
    groups = replace(fp8, scales=torch.empty(-(-dim // SPAN), dim), group_size=SPAN)

    def launch() -> None:
        for four_bits in int4:
            quant_kernel.w4a16_linear(x, four_bits)
        quant_kernel.w8a16_linear(x, int8)
        if not is_wide:
            quant_kernel.w8a8_linear(quant_kernel.quantize_tokens(x, torch.int8), int8, shape.dtype)
        if quant_kernel.has_fp8() and not is_wide:
            for weight, by_span in ((fp8, False), (groups, True)):
                tokens = quant_kernel.quantize_tokens(x, by_span=by_span)
                quant_kernel.w8a8_linear(tokens, weight, shape.dtype)

    return launch


def _int4_weight(dim: int, group_size: int) -> W4Weight:
    num_spans = -(-dim // SPAN)
    num_groups = -(-num_spans * SPAN // group_size)
    return W4Weight(
        words=torch.empty(num_spans, dim, WORDS_PER_SPAN, dtype=torch.int32),
        scales=torch.empty(num_groups, dim, dtype=torch.float16),
        zeros=torch.empty(num_groups, dim, dtype=torch.int16),
        in_features=dim,
        group_size=group_size,
        input_order=None,
        bias=None,
    )


def _mxfp4_weight(dim: int) -> W4Weight:
    plain = _int4_weight(dim, EXPONENT_INPUTS)
    return replace(plain, scales=plain.scales.to(torch.uint8), zeros=None)


def quantised_token(shape: ServedShape) -> Callable[[], object]:
    """A step of one token."""
    return quantised_launch(shape, 1, [128])


def quantised_tokens(shape: ServedShape) -> Callable[[], object]:
    """Steps for each tile size, split or not as planned; the smallest groups need the most registers."""
    steps = [quantised_launch(shape, num_tokens, [128]) for num_tokens in (20, 50)]
    steps += [quantised_launch(shape, num_tokens, [32, 64, 128]) for num_tokens in (1, 5_000)]
    return lambda: [launch() for launch in steps]
