"""Rounds the weight of a linear layer to nearest, into the tensors that compressed-tensors stores.

Four bits are `weight_packed`, `weight_scale`, `weight_shape` and perhaps `weight_zero_point`, eight bits
`weight` and `weight_scale`.
"""

from __future__ import annotations

import torch

from naiad.cli.quantize.scheme import Scheme

_PER_WORD = 8
_TOP = 15
_MIDDLE = 8
_LARGEST_BYTE = 127
# As wide as float32's, so no scale is too small for it; the numbers are those for the rounded scale.
_SCALE_DTYPE = torch.bfloat16


def round_to_nearest(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Round a weight.

    Args:
        weight: `[out, in]`, a floating dtype, finite; with four bits `in` is whole groups.
        scheme: bits, groups, and whether there are zero points.

    Returns:
        The last parts of the tensors' names, and the tensors.
    """
    wide = weight.float()
    return _four_bits(wide, scheme) if scheme.bits == 4 else _eight_bits(wide)


def _eight_bits(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = _scales(weight.abs().amax(1, keepdim=True) / _LARGEST_BYTE)
    numbers = (weight / scales.float()).round_().clamp_(-_LARGEST_BYTE, _LARGEST_BYTE)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}


def _four_bits(weight: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    groups = weight.reshape(len(weight), -1, scheme.group_size)
    # Zero must be one of the steps, so it belongs to the range of each group.
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    if scheme.is_symmetric:
        scales = _scales(torch.maximum(-low, high) * 2 / _TOP)
        zeros = torch.full_like(low, _MIDDLE)
    else:
        scales = _scales((high - low) / _TOP)
        zeros = (-low / scales.float()).round_().clamp_(0, _TOP)
    numbers = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round_().clamp_(0, _TOP)
    tensors = {
        "weight_packed": _packed(numbers.flatten(1)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not scheme.is_symmetric:
        tensors["weight_zero_point"] = _packed(zeros.T).T.contiguous()
    return tensors


def _scales(wanted: torch.Tensor) -> torch.Tensor:
    """Scales in the stored dtype; that of a group of zeros is 1."""
    scales = wanted.to(_SCALE_DTYPE)
    return torch.where(scales > 0, scales, 1)


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Pack rows of numbers 0 … 15, eight a word, the first in the lowest bits.

    Args:
        numbers: `[rows, count]`.

    Returns:
        `[rows, ⌈count / 8⌉]` int32.
    """
    whole = numbers.to(torch.int64)
    padded = torch.nn.functional.pad(whole, (0, -whole.shape[1] % _PER_WORD))
    shifts = torch.arange(_PER_WORD) * 4
    words = (padded.reshape(len(padded), -1, _PER_WORD) << shifts).sum(2)
    # The highest number takes the sign bit.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
