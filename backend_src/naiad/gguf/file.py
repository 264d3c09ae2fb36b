"""`GGUFFile`: the header of a GGUF file, checked, and its tensors mapped into memory."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from naiad.errors import ModelError
from naiad.gguf.cursor import Cursor, CursorError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_MAX_DIMENSIONS = 4
# What the package can turn into numbers.
_TYPES = {
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
        *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4"),
    )
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: as in the model, outputs before inputs; the file has it the other way round.
        kind: how its numbers are stored.
        offset: its first byte in the file.
        num_bytes: its size.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """The size of one row, the weights of an output."""
        return self.num_bytes // math.prod(self.shape[:-1])


class GGUFFile:
    """A file whose header is sound and whose tensors lie within it.

    Attributes:
        name: the file's name.
        metadata: all keys and values.
        tensors: all tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Map a file into memory and read its header.

        Raises:
            ModelError: the file cannot be read, is damaged, or holds what is not supported; names the file
                and the tensor.
        """
        self.name = path.name
        try:
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.name} can not be read: {error}") from error
        cursor = Cursor(memoryview(self._memory))
        try:
            num_tensors = self._read_start(cursor)
            infos = [self._read_info(cursor) for _ in range(num_tensors)]
        except CursorError as error:
            raise self._damaged(str(error)) from None
        self.tensors = self._place_tensors(infos, cursor.place)

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The bytes of a tensor."""
        return memoryview(self._memory)[tensor.offset : tensor.offset + tensor.num_bytes]

    def release(self) -> None:
        """Let the system take back the pages that were read."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def bad_key(self, key: str, value: object, expected: str) -> ModelError:
        """Make the error for a key of the metadata."""
        shown = f"{value!r:.200}"
        return ModelError(f"{self.name}: {key} = {shown} is not supported: expected {expected}")

    def _read_start(self, cursor: Cursor) -> int:
        if len(self._memory) < 4 or self._memory[:4] != _MAGIC:
            raise ModelError(f"{self.name} is not a GGUF file")
        cursor.place = 4
        version, num_tensors, num_keys = (cursor.number(letter) for letter in "IQQ")
        if version not in _VERSIONS:
            raise self.bad_key("the version", version, "2 or 3, in little-endian order")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text()
            if key in self.metadata:
                raise CursorError(f"the key {key!r} is there twice")
            self.metadata[key] = cursor.value()
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise self.bad_key("split.count", self.metadata["split.count"], "one file with all tensors")
        return int(num_tensors)

    def _read_info(self, cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
        """Read name, shape, type and offset of a tensor."""
        name, num_dimensions = cursor.text(), cursor.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise CursorError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([cursor.number("Q") for _ in range(num_dimensions)]))
        return name, shape, cursor.number("I"), cursor.number("Q")

    def _place_tensors(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], end_of_header: int
    ) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_power = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
        if not is_power or alignment > _MAX_ALIGNMENT:
            raise self.bad_key("general.alignment", alignment, f"a power of two up to {_MAX_ALIGNMENT}")
        start = -(-end_of_header // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self._damaged(f"the tensor {name!r} is there twice")
            if offset % alignment:
                raise self._damaged(f"tensor {name!r} does not lie at a multiple of {alignment} bytes")
            tensors[name] = self._tensor(name, shape, kind, start + offset)
        self._refuse_overlaps(tensors)
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        kind = next((each for each in _TYPES if each == number), None)
        if kind is None:
            names = ", ".join(sorted(each.name for each in _TYPES))
            raise ModelError(f"{self.name}: tensor {name!r} has the type {number}: expected one of {names}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self._damaged(
                f"tensor {name!r} of shape {shape} has no whole blocks of {block} for {kind.name}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._memory):
            raise self._damaged(f"tensor {name!r} ends at byte {offset + num_bytes}, after the file's end")
        return GGUFTensor(shape, kind, offset, num_bytes)

    def _refuse_overlaps(self, tensors: dict[str, GGUFTensor]) -> None:
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda each: each[1].offset):
            if tensor.offset < end:
                raise self._damaged(f"tensor {name!r} overlaps another")
            end = tensor.offset + tensor.num_bytes

    def _damaged(self, how: str) -> ModelError:
        return ModelError(f"{self.name} is damaged or incomplete: {how}")
