"""Writes quantised checkpoints from the documented layouts, with numpy and bit by bit.

Each writer takes a weight `[N, K]` in float64 and returns the tensors of the layer, and the weight that they
stand for. Nothing here is shared with the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[Any]
Layer = tuple[dict[str, Array | torch.Tensor], Array]
Writer = Callable[[Array], Layer]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def write_checkpoint(
    source: Path, target: Path, writer_of: Callable[[str], Writer | None], quantization_config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Write a quantised copy of a float32 checkpoint.

    Args:
        source: has model.safetensors.
        target: the new directory.
        writer_of: a layer's name → its writer; None: it is copied.
        quantization_config: goes into config.json.

    Returns:
        The weights that the new checkpoint stands for, by their names in the old one.
    """
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization_config}
    (target / "config.json").write_text(json.dumps(config))
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        is_linear = tensor.ndim == 2 and layer != name and "embed_tokens" not in name
        writer = writer_of(layer) if is_linear else None
        if writer is None:
            stored[name] = meant[name] = tensor
            continue
        parts, weight = writer(tensor.double().numpy())
        meant[name] = torch.from_numpy(weight.astype(np.float32))
        for part, value in parts.items():
            stored[f"{layer}.{part}"] = _tensor(value)
    save_file(stored, target / "model.safetensors")
    return meant


def _tensor(value: Array | torch.Tensor) -> torch.Tensor:
    return (value if isinstance(value, torch.Tensor) else torch.from_numpy(value)).contiguous()


def packed_bits(numbers: Array, bits: int) -> Array:
    """Pack the rows of `[rows, count]` without gaps, the lowest bits first: int32 `[rows, words]`."""
    rows, count = numbers.shape
    every = (numbers.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    flat = every.reshape(rows, count * bits)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


def packed_with_gaps(numbers: Array, bits: int) -> Array:
    """Pack whole numbers into words, as compressed-tensors did before May 2026."""
    rows, count = numbers.shape
    of_word = 32 // bits
    padded = np.pad(numbers.astype(np.int64), ((0, 0), (0, -count % of_word))).reshape(rows, -1, of_word)
    words = sum(padded[:, :, place] << place * bits for place in range(of_word))
    return np.asarray(words, dtype=np.int64).astype(np.uint32).view(np.int32)


@dataclass
class Rounded:
    """A weight as numbers `[N, K]`, zeros and scales `[N, groups]`, and the group of each input."""

    numbers: Array
    zeros: Array
    scales: Array
    group_ids: Array

    @property
    def weight(self) -> Array:
        scales, zeros = self.scales[:, self.group_ids], self.zeros[:, self.group_ids]
        return (self.numbers.astype(np.float64) - zeros) * scales.astype(np.float64)


def rounded(
    weight: Array, bits: int, group_ids: Array, symmetric: bool, scale_dtype: Any = np.float16
) -> Rounded:
    """Round to nearest in groups of inputs; numbers are 0 … 2^bits − 1."""
    num_groups, top = int(group_ids.max()) + 1, 2**bits - 1
    low, high = (np.zeros((len(weight), num_groups)) for _ in range(2))
    for group in range(num_groups):
        part = weight[:, group_ids == group]
        low[:, group], high[:, group] = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
    if symmetric:
        scales = 2 * np.maximum(-low, high) / top
        zeros = np.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / top
        zeros = np.clip(np.rint(-low / scales), 0, top)
    scales = np.maximum(scales, 1e-5).astype(scale_dtype)
    numbers = np.rint(weight / scales[:, group_ids].astype(np.float64) + zeros[:, group_ids])
    return Rounded(np.clip(numbers, 0, top).astype(np.int64), zeros, scales, group_ids)


def group_ids_of(num_inputs: int, group_size: int, shuffled: int | None = None) -> Array:
    """The group of each input; in a random order of the inputs if a seed is given."""
    ids = np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    return ids if shuffled is None else np.random.default_rng(shuffled).permutation(ids)


def gptq(
    bits: int, group_size: int, sym: bool, version: int = 1, order: str = "sorted", seed: int = 0
) -> Writer:
    """A writer of GPTQ; `order`: "sorted", "shuffled", or "missing" for files without g_idx."""

    def write(weight: Array) -> Layer:
        ids = group_ids_of(weight.shape[1], group_size, seed if order == "shuffled" else None)
        found = rounded(weight, bits, ids, sym)
        zeros = found.zeros
        if version == 1:
            # A zero point of 0 cannot be stored in version 1.
            zeros = np.maximum(zeros, 1)
            found.zeros = zeros
            zeros = zeros - 1
        parts: dict[str, Array | torch.Tensor] = {
            "qweight": packed_bits(found.numbers, bits).T,
            "qzeros": packed_bits(zeros.T, bits),
            "scales": found.scales.T,
        }
        if order != "missing":
            parts["g_idx"] = ids.astype(np.int32)
        return {name: np.ascontiguousarray(value) for name, value in parts.items()}, found.weight

    return write


def awq(group_size: int) -> Writer:
    """A writer of AWQ in the order of its gemm kernel."""

    def words(numbers: Array) -> Array:
        shape = (len(numbers), numbers.shape[1] // 8, 8)
        return packed_bits(numbers.reshape(shape)[:, :, _AWQ_ORDER].reshape(len(numbers), -1), 4)

    def write(weight: Array) -> Layer:
        found = rounded(weight, 4, group_ids_of(weight.shape[1], group_size), symmetric=False)
        parts = {
            "qweight": words(found.numbers.T),
            "qzeros": words(found.zeros.T),
            "scales": np.ascontiguousarray(found.scales.T),
        }
        return dict(parts), found.weight

    return write


def packed(
    bits: int,
    group_size: int,
    symmetric: bool,
    dense: bool = True,
    g_idx: bool = False,
    old_zeros: bool = False,
) -> Writer:
    """A writer of compressed-tensors' pack-quantized; −1: a scale for each output."""
    pack = packed_bits if dense else packed_with_gaps

    def write(weight: Array) -> Layer:
        ids = group_ids_of(weight.shape[1], group_size, 7 if g_idx else None)
        found = rounded(weight, bits, ids, symmetric)
        parts: dict[str, Array | torch.Tensor] = {
            "weight_packed": pack(found.numbers, bits),
            "weight_scale": found.scales,
            "weight_shape": np.array(weight.shape, dtype=np.int64),
        }
        if not symmetric and old_zeros:
            parts["weight_zero_point"] = (found.zeros - 2 ** (bits - 1)).astype(np.int8)
        elif not symmetric:
            parts["weight_zero_point"] = np.ascontiguousarray(pack(found.zeros.T, bits).T)
        if g_idx:
            parts["weight_g_idx"] = ids.astype(np.int32)
        return parts, found.weight

    return write


def int8(symmetric: bool = True, static_inputs: bool = False, flat_scale: bool = False) -> Writer:
    """A writer of compressed-tensors' int-quantized, with a scale for each output."""

    def write(weight: Array) -> Layer:
        found = rounded(weight, 8, group_ids_of(weight.shape[1], -1), symmetric, np.float32)
        scales = found.scales[:, 0] if flat_scale else found.scales
        parts: dict[str, Array | torch.Tensor] = {
            "weight": (found.numbers - 128).astype(np.int8),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
        }
        found.scales = torch.from_numpy(found.scales).bfloat16().float().numpy()
        if not symmetric:
            parts["weight_zero_point"] = (found.zeros - 128).astype(np.int8)
        if static_inputs:
            parts["input_scale"] = np.array([0.02], dtype=np.float32)
        return parts, found.weight

    return write


def float8(
    block: tuple[int, int] | None,
    scale_name: str = "weight_scale",
    exponents: bool = False,
    input_scale: str = "",
) -> Writer:
    """A writer of float8_e4m3fn.

    `block`: outputs and inputs with one scale, (0, 0) for the whole tensor. `input_scale`: the name of a
    static scale of the inputs.
    """

    def write(weight: Array) -> Layer:
        outputs, inputs = block or (1, weight.shape[1])
        outputs, inputs = outputs or len(weight), inputs or weight.shape[1]
        grid = (-(-len(weight) // outputs), -(-weight.shape[1] // inputs))
        scales = np.zeros(grid, dtype=np.float32)
        numbers = np.zeros(weight.shape, dtype=np.float32)
        meant = np.zeros(weight.shape)
        for row in range(grid[0]):
            for column in range(grid[1]):
                place = np.s_[row * outputs : (row + 1) * outputs, column * inputs : (column + 1) * inputs]
                scale = np.float32(np.abs(weight[place]).max() / 448)
                if exponents:
                    scale = np.float32(2.0 ** np.ceil(np.log2(scale)))
                scales[row, column] = scale
                rounded8 = torch.from_numpy(weight[place] / scale).to(torch.float8_e4m3fn).double().numpy()
                numbers[place], meant[place] = rounded8, rounded8 * np.float64(scale)
        parts: dict[str, Array | torch.Tensor] = {"weight": torch.from_numpy(numbers).to(torch.float8_e4m3fn)}
        stored = torch.from_numpy(scales)
        if block == (0, 0):
            stored = stored.reshape(1)
        parts[scale_name] = stored.to(torch.float8_e8m0fnu) if exponents else stored
        if input_scale:
            parts[input_scale] = np.array(0.02, dtype=np.float32)
        return parts, meant

    return write


def mxfp4() -> Writer:
    """A writer of compressed-tensors' mxfp4-pack-quantized."""

    def write(weight: Array) -> Layer:
        groups = weight.reshape(len(weight), -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(2))) - 2
        scaled = groups / 2.0 ** exponents[:, :, None]
        codes = np.abs(scaled[..., None] - _E2M1).argmin(-1)
        meant = _E2M1[codes] * 2.0 ** exponents[:, :, None]
        flat = codes.reshape(len(weight), -1, 2).astype(np.uint8)
        parts = {
            "weight_packed": flat[:, :, 0] | flat[:, :, 1] << 4,
            "weight_scale": (exponents + 127).astype(np.uint8),
        }
        return dict(parts), meant.reshape(weight.shape)

    return write
