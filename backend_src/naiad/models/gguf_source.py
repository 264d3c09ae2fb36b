"""`GGUFSource`: the weights of a GGUF file under their names in safetensors files."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.gguf import GGUFFile, GGUFTensor
from naiad.gguf.model_keys import ROPE_FACTORS
from naiad.models.quantised import WeightRows
from naiad_kernels.linear.quantised.kept import GPUForm, MXFP4Weight
from naiad_kernels.native.nibbles import NibbleWeight

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OWN_LAYER = re.compile(r"blk\.(\d+)\.")
_OWN_ENDS = ("token_embd.", "output.")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# How many float16 a block begins with.
_HALVES = {GGMLQuantizationType.Q4_0: 1, GGMLQuantizationType.Q4_1: 2}
# So many bytes of the file are read before their pages are given back.
_MAX_MAPPED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class GGUFRows:
    """A `WeightRows` of a GGUF file.

    Attributes:
        place, shape: as `WeightRows` has them.
        file: the file.
        tensor: where the weight lies in it.
        order: the file's row of each output; None: the same.
    """

    place: str
    shape: tuple[int, int]
    file: GGUFFile
    tensor: GGUFTensor
    order: torch.Tensor | None

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Compute rows; see `WeightRows`."""
        # A scale that is not finite is found in the result.
        with np.errstate(all="ignore"):
            numbers = dequantize(self._stored(first, last), self.tensor.kind)
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32).copy())

    def nibbles(self) -> NibbleWeight | None:
        """Keep the numbers of Q4_0 and Q4_1; see `WeightRows`.

        A block is a scale and, in Q4_1, a minimum, both float16, then the numbers.
        """
        num_halves = _HALVES.get(self.tensor.kind)
        if num_halves is None:
            return None
        begins, numbers = self._begins_and_numbers(2 * num_halves)
        halves = begins.view(torch.float16)
        scales = halves[:, :, 0].contiguous()
        if num_halves == 2:
            return NibbleWeight.of_minimums(numbers, scales, halves[:, :, 1].contiguous())
        return NibbleWeight.of_zero_points(numbers, scales.float(), torch.full(scales.shape, 8.0))

    def gpu_form(self) -> GPUForm | None:
        """Keep the floats of MXFP4; see `WeightRows`. A block is an exponent, then the floats."""
        if self.tensor.kind != GGMLQuantizationType.MXFP4:
            return None
        exponents, codes = self._begins_and_numbers(1)
        return MXFP4Weight.of_codes(codes, exponents.flatten(1))

    def _begins_and_numbers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpack blocks of 32 inputs that begin with so many bytes.

        16 bytes follow. Each has an input in its lower half and the one that comes 16 inputs later in its
        upper half.

        Returns:
            `[out, blocks, num_bytes]`, and `[out, in]`: both uint8.
        """
        stored = torch.from_numpy(self._stored(0, self.shape[0]).copy())
        blocks = stored.view(self.shape[0], -1, num_bytes + 16)
        both = blocks[:, :, num_bytes:]
        return blocks[:, :, :num_bytes].contiguous(), torch.cat((both & 15, both >> 4), 2).flatten(1)

    def _stored(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """The blocks of some outputs: `[outputs, bytes]`."""
        data = np.frombuffer(self.file.data(self.tensor), dtype=np.uint8).reshape(self.shape[0], -1)
        wanted = data[first:last] if self.order is None else data[self.order[first:last].numpy()]
        return np.ascontiguousarray(wanted)


class GGUFSource:
    """A `WeightSource` of a GGUF file."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Read the file's header.

        Args:
            path: the file.
            config: its configuration, as `ModelConfig` reads it.

        Raises:
            ModelError: the file is damaged or not supported.
        """
        self._file = GGUFFile(path)
        self._config = config
        # Only files of this architecture have another order of queries and keys.
        self._is_permuted = self._file.metadata["general.architecture"] == "llama"
        self._left = dict.fromkeys(self._file.tensors)
        self._left.pop(ROPE_FACTORS, None)
        self._num_read = 0

    def read(self, name: str, shape: tuple[int, ...]) -> WeightRows:
        """Read a weight; see `WeightSource`. A weight of one dimension is one row."""
        own = _own_name(name)
        place = f"{self._file.name}: tensor {own!r}"
        if own not in self._left:
            raise ModelError(f"{place} is missing")
        tensor = self._file.tensors[own]
        if tensor.shape != shape:
            raise ModelError(f"{place} has shape {tensor.shape}, the metadata asks for {shape}")
        del self._left[own]
        self._num_read += tensor.num_bytes
        if self._num_read > _MAX_MAPPED_BYTES:
            self._file.release()
            self._num_read = 0
        order = self._order(name, shape[0])
        if len(shape) == 1:
            tensor = _as_column(tensor) if order is not None else _as_row(tensor)
        return GGUFRows(place, (tensor.shape[0], tensor.shape[1]), self._file, tensor, order)

    def take_copy(self, name: str, shape: tuple[int, int]) -> None:
        """None: a file with a head of its own ties none to the embedding; see `WeightSource`."""

    def leave(self, layers: Collection[int], ends: bool) -> None:
        """Skip weights; see `WeightSource`."""
        for own in list(self._left):
            match = _OWN_LAYER.match(own)
            if int(match[1]) in layers if match else ends and own.startswith(_OWN_ENDS):
                del self._left[own]

    def finish(self) -> None:
        """Tell that all weights were read; see `WeightSource`."""
        if self._left:
            raise ModelError(
                f"{self._file.name}: {len(self._left)} tensors the architecture has no place for, the first "
                f"is {next(iter(self._left))!r}"
            )

    def _order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """The file's row of each output of the projections to queries and keys.

        The file has the two halves of a head, which the rotary embedding pairs, in turns.
        """
        is_query_or_key = ".q_proj." in name or ".k_proj." in name
        if not self._is_permuted or not is_query_or_key:
            return None
        head_dim = self._config.head_dim
        return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def _own_name(name: str) -> str:
    """A weight's name in GGUF files."""
    base, _, kind = name.rpartition(".")
    match = _LAYER.fullmatch(base)
    if match is None:
        return f"{_NAMES[base]}.{kind}"
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"


def _as_row(tensor: GGUFTensor) -> GGUFTensor:
    return GGUFTensor((1, *tensor.shape), tensor.kind, tensor.offset, tensor.num_bytes)


def _as_column(tensor: GGUFTensor) -> GGUFTensor:
    return GGUFTensor((*tensor.shape, 1), tensor.kind, tensor.offset, tensor.num_bytes)
