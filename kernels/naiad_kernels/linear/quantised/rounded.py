"""Rounds weights of 16 or 32 bits at load to the forms that the kernels for a GPU multiply by."""

from __future__ import annotations

import torch

from naiad_kernels.linear.quantised import quantize_tokens
from naiad_kernels.linear.quantised.repack import repack_nibbles
from naiad_kernels.linear.quantised.weights import ByteWeight, W4Weight
from naiad_kernels.native.nibbles import NibbleWeight

_BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def round_weight(matrix: torch.Tensor, bias: torch.Tensor | None, quantization: str) -> W4Weight | ByteWeight:
    """Round a weight to the nearest numbers of its new form.

    Args:
        matrix: `[out_features, in_features]`, floating dtype, on the device it will run on.
        bias: `[out_features]`, or None.
        quantization: "int4": groups of 32 inputs with a scale and a whole zero point each, or int8 if a
            scale is larger than float16 holds; "int8" or "fp8": a scale for each output.

    Returns:
        Inputs are rounded too if the weight is in FP8, with a scale for each token, and else not.

    Raises:
        ValueError: FP8 on a GPU that is older than Hopper (sm_90).
    """
    if quantization == "int4":
        nibbles = NibbleWeight.rounded(matrix, has_whole_zeros=True)
        packed = None if nibbles is None else repack_nibbles(nibbles, bias, matrix.device)
        if packed is not None:
            return packed
    # A row of the weight is scaled as a token is.
    rows = quantize_tokens(matrix, _BYTES.get(quantization, torch.int8))
    return ByteWeight(rows.values, rows.scales, bias, rounds_inputs=quantization == "fp8")
