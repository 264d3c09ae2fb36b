"""Converts numbers of four bits to the layout of `W4Weight`, once, at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from naiad_kernels.linear.quantised.kept import EXPONENT_INPUTS, MXFP4Weight, ReorderedNibbles
from naiad_kernels.linear.quantised.weights import INPUTS_PER_STEP, SPAN, WORDS_PER_SPAN, W4Weight
from naiad_kernels.native.nibbles import GROUP_INPUTS, NibbleWeight

_CODES_PER_WORD = 8
_IN_ORDER = range(_CODES_PER_WORD)
# Where AWQ keeps each of eight neighbouring columns in a word.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
_LARGEST_ZERO = 16


@dataclass(frozen=True, slots=True)
class Int4Tensors:
    """A linear layer's tensors, named as in checkpoints.

    Attributes:
        qweight: int32; GPTQ `[in_features / 8, out_features]`, AWQ `[in_features, out_features / 8]`.
        qzeros: `[num_groups, out_features / 8]` int32.
        scales: `[num_groups, out_features]`, floating dtype.
        g_idx: `[in_features]`, the group of each input (GPTQ's act-order), or None.
        bias: `[out_features]`, or None.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def repack_gptq(tensors: Int4Tensors, group_size: int, zero_offset: int = 1) -> W4Weight:
    """Convert a GPTQ layer: eight inputs per word, zeros stored minus `zero_offset`.

    Args:
        tensors: one layer's tensors, on any device.
        group_size: 32, 64, a multiple of 128, or −1 for one group.
        zero_offset: 1 for the format "gptq", 0 for "gptq_v2".

    Raises:
        ValueError: a tensor's dtype or shape, the group size or g_idx is not as described here.
    """
    _check_words("qweight", tensors.qweight)
    in_features = tensors.qweight.shape[0] * _CODES_PER_WORD
    codes = _nibbles(tensors.qweight, _IN_ORDER, dim=1).flatten(0, 1)
    if codes.shape[1] % _CODES_PER_WORD:
        raise ValueError(f"qweight: {codes.shape[1]} outputs; allowed: a multiple of {_CODES_PER_WORD}")
    group_size = _whole_group(group_size, in_features)
    _check_groups(tensors, in_features, codes.shape[1], group_size)
    order = _input_order(tensors.g_idx, in_features, group_size)
    if order is not None:
        codes = codes[order]
    zeros = _nibbles(tensors.qzeros, _IN_ORDER, dim=2).flatten(1).to(torch.int16) + zero_offset
    return _pack(codes, zeros, tensors.scales, tensors.bias, group_size, order)


def repack_awq(tensors: Int4Tensors, group_size: int) -> W4Weight:
    """Convert an AWQ layer: eight outputs per word, in AWQ's order.

    Args:
        tensors: one layer's tensors, on any device; without g_idx.
        group_size: as for `repack_gptq`.

    Raises:
        ValueError: as for `repack_gptq`.
    """
    _check_words("qweight", tensors.qweight)
    if tensors.g_idx is not None:
        raise ValueError("g_idx: given with an AWQ layer; allowed: only with GPTQ")
    codes = _nibbles(tensors.qweight, _AWQ_NIBBLES, dim=2).flatten(1)
    in_features, out_features = codes.shape
    group_size = _whole_group(group_size, in_features)
    _check_groups(tensors, in_features, out_features, group_size)
    zeros = _nibbles(tensors.qzeros, _AWQ_NIBBLES, dim=2).flatten(1).to(torch.int16)
    return _pack(codes, zeros, tensors.scales, tensors.bias, group_size, None)


def repack_nibbles(weight: NibbleWeight, bias: torch.Tensor | None, device: torch.device) -> W4Weight | None:
    """Convert numbers that a checkpoint's reader has kept, or that a weight was rounded to.

    Args:
        weight: on the CPU or on `device`.
        bias: `[out_features]` on `device`, or None.
        device: where the result lies.

    Returns:
        None: the weight has minimums, or a zero point that is no whole number in 0 … 16.
    """
    zeros = weight.zero_points()
    if zeros is None or bool(((zeros < 0) | (zeros > _LARGEST_ZERO) | (zeros != zeros.round())).any()):
        return None
    in_features = weight.numbers.shape[1]
    per_group, group_size = _joined_groups(weight.scales, zeros, in_features)
    scales, zeros = (each[:, ::per_group].T.contiguous().to(device) for each in (weight.scales, zeros))
    codes = weight.numbers.to(device).T
    return _pack(codes, zeros.to(torch.int16), scales, bias, group_size, None)


def repack_reordered(
    weight: ReorderedNibbles, bias: torch.Tensor | None, device: torch.device
) -> W4Weight | None:
    """Convert numbers whose inputs are sorted by group; as `repack_nibbles`."""
    packed = repack_nibbles(weight.nibbles, bias, device)
    return None if packed is None else replace(packed, input_order=weight.input_order.to(device))


def repack_mxfp4(weight: MXFP4Weight, bias: torch.Tensor | None, device: torch.device) -> W4Weight:
    """Convert floats of four bits with exponents.

    Args:
        weight: on the CPU.
        bias: `[out_features]` on `device`, or None.
        device: where the result lies.
    """
    codes, exponents = weight.codes().to(device).T, weight.exponents.to(device).T
    return _pack(codes, None, exponents, bias, EXPONENT_INPUTS, None)


def _joined_groups(
    scales: torch.Tensor,  # [out_features, num_groups]
    zeros: torch.Tensor,
    in_features: int,
) -> tuple[int, int]:
    """How many groups of 32 inputs can be one, because they share scale and zero; and their inputs."""
    places = torch.arange(scales.shape[1])
    whole = _whole_group(-1, in_features)
    for group_size in (whole, SPAN, SPAN // 2):
        first = places - places % (group_size // GROUP_INPUTS)
        if torch.equal(scales, scales[:, first]) and torch.equal(zeros, zeros[:, first]):
            return group_size // GROUP_INPUTS, group_size
    return 1, GROUP_INPUTS


def _nibbles(words: torch.Tensor, positions: Sequence[int], dim: int) -> torch.Tensor:
    """The codes at these positions of each word, uint8, in a new dimension."""
    return torch.stack([((words >> 4 * each) & 15).to(torch.uint8) for each in positions], dim)


def _pack(
    codes: torch.Tensor,  # [in_features, out_features] uint8
    zeros: torch.Tensor | None,  # [num_groups, out_features] int16
    scales: torch.Tensor,  # [num_groups, out_features]
    bias: torch.Tensor | None,
    group_size: int,
    order: torch.Tensor | None,
) -> W4Weight:
    in_features, out_features = codes.shape
    num_spans = -(-in_features // SPAN)
    padded = torch.nn.functional.pad(codes, (0, 0, 0, num_spans * SPAN - in_features))
    steps = SPAN // INPUTS_PER_STEP
    placed = padded.view(num_spans, steps, WORDS_PER_SPAN, 2, out_features)
    words = torch.zeros(num_spans, WORDS_PER_SPAN, out_features, dtype=torch.int32, device=codes.device)
    for step in range(steps):
        for half in range(2):
            words |= placed[:, step, :, half].to(torch.int32) << (4 * step + 16 * half)
    missing_groups = -(-num_spans * SPAN // group_size) - len(scales)
    padding = (0, 0, 0, missing_groups)
    scales = torch.nn.functional.pad(scales, padding).contiguous()
    zeros = None if zeros is None else torch.nn.functional.pad(zeros, padding).contiguous()
    return W4Weight(words.transpose(1, 2).contiguous(), scales, zeros, in_features, group_size, order, bias)


def _whole_group(group_size: int, in_features: int) -> int:
    """The group size for the kernels; a single group is as long as the padded inputs."""
    if group_size == -1:
        return -(-in_features // SPAN) * SPAN
    if group_size not in (32, 64) and (group_size <= 0 or group_size % SPAN):
        raise ValueError(f"group_size: {group_size}; allowed: -1, 32, 64 or a multiple of {SPAN}")
    return group_size


def _check_words(name: str, words: torch.Tensor) -> None:
    if words.dtype != torch.int32 or words.dim() != 2:
        shape = list(words.shape)
        raise ValueError(f"{name}: {words.dtype} of shape {shape}; allowed: two dimensions of int32")


def _check_groups(tensors: Int4Tensors, in_features: int, out_features: int, group_size: int) -> None:
    num_groups = -(-in_features // group_size)
    _check_words("qzeros", tensors.qzeros)
    shapes = {
        "qzeros": (tensors.qzeros, (num_groups, out_features // _CODES_PER_WORD)),
        "scales": (tensors.scales, (num_groups, out_features)),
        "bias": (tensors.bias, (out_features,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name}: shape {list(tensor.shape)}; allowed: {list(shape)}")
    if not tensors.scales.is_floating_point():
        raise ValueError(f"scales: {tensors.scales.dtype}; allowed: a floating dtype")


def _input_order(g_idx: torch.Tensor | None, in_features: int, group_size: int) -> torch.Tensor | None:
    """The inputs sorted by group, or None if they are in that order already."""
    if g_idx is None:
        return None
    if g_idx.shape != (in_features,):
        raise ValueError(f"g_idx: shape {list(g_idx.shape)}; allowed: [{in_features}]")
    own = torch.arange(in_features, device=g_idx.device)
    order = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[order].long(), own // group_size):
        raise ValueError(
            f"g_idx: groups that are not of {group_size} inputs each; allowed: a permutation of "
            f"whole groups (a part of a layer with act-order cannot be loaded)"
        )
    return None if torch.equal(order, own) else order
