"""Reference for the quantised linears, in plain float32 torch."""

from __future__ import annotations

import torch

from naiad_kernels.linear.quantised.kept import E2M1, EXPONENT_BIAS
from naiad_kernels.linear.quantised.weights import (
    INPUTS_PER_STEP,
    SPAN,
    WORDS_PER_SPAN,
    ByteTokens,
    ByteWeight,
    W4Weight,
)

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def w4a16_linear(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """Compute the public op; weights are converted to float32 and never rounded."""
    ordered = x if weight.input_order is None else x[:, weight.input_order]
    groups = torch.arange(weight.in_features, device=x.device) // weight.group_size
    codes = _codes(weight)
    if weight.zeros is None:
        matrix = torch.ldexp(E2M1.to(x.device)[codes.long()], weight.scales[groups].int() - EXPONENT_BIAS)
    else:
        matrix = (codes.float() - weight.zeros.float()[groups]) * weight.scales.float()[groups]
    return _with_bias(ordered.float() @ matrix, weight.bias, x.dtype)


def _codes(weight: W4Weight) -> torch.Tensor:
    """The weight's codes, `[in_features, out_features]` int32."""
    steps = SPAN // INPUTS_PER_STEP
    shifts = [4 * step + 16 * half for step in range(steps) for half in range(2)]
    codes = torch.stack([(weight.words >> shift) & 15 for shift in shifts])
    codes = codes.view(steps, 2, -1, weight.out_features, WORDS_PER_SPAN)
    # Input = 32 · step + 2 · word + half of its span.
    return codes.permute(2, 0, 4, 1, 3).reshape(-1, weight.out_features)[: weight.in_features]


def w8a16_linear(x: torch.Tensor, weight: ByteWeight) -> torch.Tensor:
    """Compute the public op."""
    product = x.float() @ weight.values.float().T * weight.scales.float()
    return _with_bias(product, weight.bias, x.dtype)


def w8a8_linear(tokens: ByteTokens, weight: ByteWeight, dtype: torch.dtype) -> torch.Tensor:
    """Compute the public op."""
    if weight.group_size is not None:
        scales = tokens.scales.T.repeat_interleave(SPAN, 1)[:, : weight.in_features]
        return _with_bias(tokens.values.float() * scales @ weight.matrix().T, weight.bias, dtype)
    # Sums of products of int8 are exact in float64, as the kernel's are within a chunk.
    wide = torch.float64 if weight.values.dtype == torch.int8 else torch.float32
    product = (tokens.values.to(wide) @ weight.values.to(wide).T).float()
    scaled = product * weight.scales.float() * tokens.scales[:, None]
    return _with_bias(scaled, weight.bias, dtype)


def quantize_tokens(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, by_span: bool = False
) -> ByteTokens:
    """Compute the public op."""
    largest, dim = LARGEST[dtype], x.shape[1]
    size = SPAN if by_span else dim
    groups = torch.nn.functional.pad(x.float(), (0, -dim % size)).view(len(x), -(-dim // size), size)
    # 0 · x is NaN for NaN and infinity, else 0: so the scale and the output of such a token are NaN.
    scales = groups.abs().amax(2) / largest + (groups * 0).sum(2)
    divisors = torch.where(scales > 0, scales, 1.0)
    values = (groups / divisors[:, :, None]).clamp(-largest, largest).flatten(1)[:, :dim]
    if dtype == torch.int8:
        values = torch.floor(values.nan_to_num() + 0.5)
    return ByteTokens(values.to(dtype).contiguous(), scales.T.contiguous() if by_span else scales[:, 0])


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (product if bias is None else product + bias.float()).to(dtype)
