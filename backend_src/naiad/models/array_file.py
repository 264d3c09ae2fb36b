"""A file of named arrays that is written once, array by array, and then mapped into memory.

    header  4,096 bytes: magic, version, place of the table, SHA-256 of all that follows; its own SHA-256
    arrays  each at a multiple of 4,096 bytes
    table   JSON: the key of the file, and each array's name, dtype, shape and place

The file knows nothing of what the arrays mean. It may come from anybody: whatever it says of its arrays is
checked when it is opened.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import struct
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import torch

PAGE_BYTES = 4096
_MAGIC = b"NAIADARR"
_VERSION = 1
# Magic, version, offset and size of the table, SHA-256 of everything after the header.
_HEADER = struct.Struct("<8sQQQ32s")
# A model of a thousand layers needs a tenth of it.
_MAX_TABLE_BYTES = 16 << 20
_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ArrayFileError(Exception):
    """A file is not a whole array file; the text says what is wrong."""


class _Array(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=8)]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class _Table(msgspec.Struct, frozen=True):
    key: str
    arrays: dict[str, _Array]
    notes: dict[str, dict[str, int | str]]


class ArrayWriter:
    """Writes an array file.

    Attributes:
        notes: small values by name that are stored with the arrays.
        sha256: of everything after the header, in hexadecimal digits, once the file is finished.
    """

    def __init__(self, file: BinaryIO, key: str, max_bytes: int) -> None:
        """Begin a file.

        Args:
            file: empty, readable and writable; the caller closes it.
            key: what the arrays were made from, and how.
            max_bytes: of all arrays together. The file is as large until it is finished, but empty: so one
                mapping serves all arrays.

        Raises:
            OSError: there can be no file of that size.
        """
        file.truncate(2 * PAGE_BYTES + max_bytes)
        self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file = file
        self._key = key
        self._arrays: dict[str, _Array] = {}
        self._digest = hashlib.sha256()
        self.notes: dict[str, dict[str, int | str]] = {}
        self.sha256 = ""
        self._end = PAGE_BYTES
        file.write(bytes(PAGE_BYTES))

    def add(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """Write an array, and return it as the file has it, mapped into memory.

        Args:
            name: not used before.
            array: on the CPU, contiguous.

        Raises:
            OSError: the file cannot be written, or the arrays are larger than was said.
        """
        assert name not in self._arrays, name
        assert array.is_contiguous(), array.stride()
        self._write(bytes(-self._end % PAGE_BYTES))
        entry = _Array(_NAMES[array.dtype], list(array.shape), self._end)
        # numpy has no bfloat16.
        self._write(array.reshape(-1).view(torch.uint8).numpy().data)
        self._file.flush()
        self._arrays[name] = entry
        return _array(self._memory, entry)

    def finish(self) -> None:
        """Write the table and the header; the file is complete then.

        Raises:
            OSError: the file cannot be written.
        """
        table = msgspec.json.encode(_Table(self._key, self._arrays, self.notes))
        offset = self._end
        self._write(table)
        self._file.truncate(self._end)
        self.sha256 = self._digest.hexdigest()
        header = _HEADER.pack(_MAGIC, _VERSION, offset, len(table), self._digest.digest())
        self._file.seek(0)
        self._file.write(header + hashlib.sha256(header).digest())
        self._file.flush()

    def bytes_from(self, name: str) -> torch.Tensor:
        """The memory of an array and of all after it: `[num_bytes]`, uint8."""
        return _bytes_from(self._memory, self._arrays, name)

    def forget_pages(self) -> None:
        """Let go what has been read through the mapping; it is there again when it is read again."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _write(self, content: bytes | memoryview) -> None:
        if self._end + len(content) > len(self._memory):
            raise OSError(errno.EFBIG, "the arrays are larger than was expected")
        self._file.write(content)
        self._digest.update(content)
        self._end += len(content)


class ArrayFile:
    """A complete array file, opened for reading.

    Attributes:
        key: what the arrays were made from, and how.
        sha256: of everything after the header, as the header says.
        notes: small values by name.
    """

    def __init__(self, path: Path) -> None:
        """Read header and table.

        Raises:
            OSError: the file cannot be read.
            ArrayFileError: it is not an array file, is incomplete, or has a damaged header or table; or an
                array is not before the table, on pages of its own.
        """
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            own_digest = file.read(hashlib.sha256().digest_size)
            if len(header) < _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
                raise ArrayFileError("it is no array file")
            if hashlib.sha256(header).digest() != own_digest:
                raise ArrayFileError("its header is damaged")
            _, version, offset, size, digest = _HEADER.unpack(header)
            if version != _VERSION:
                raise ArrayFileError(f"its format has version {version}, not {_VERSION}")
            if os.fstat(file.fileno()).st_size != offset + size:
                raise ArrayFileError("it is incomplete")
            if size > _MAX_TABLE_BYTES:
                raise ArrayFileError("its table is too large")
            file.seek(offset)
            self._table = _decode_table(file.read(size))
            _check_places(self._table.arrays.values(), offset)
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._memory.madvise(mmap.MADV_WILLNEED)
        self.key = self._table.key
        self.notes = self._table.notes
        self.sha256: str = digest.hex()

    @property
    def names(self) -> Collection[str]:
        """The arrays' names."""
        return self._table.arrays.keys()

    def array(self, name: str) -> torch.Tensor:
        """Map an array into memory; it is read when it is used.

        Raises:
            ArrayFileError: there is no such array.
        """
        if name not in self.names:
            raise ArrayFileError(f"it has no array {name!r}")
        return _array(self._memory, self._table.arrays[name])

    def bytes_from(self, name: str) -> torch.Tensor:
        """The memory of an array and of all after it: `[num_bytes]`, uint8.

        Raises:
            ArrayFileError: there is no such array.
        """
        if name not in self.names:
            raise ArrayFileError(f"it has no array {name!r}")
        return _bytes_from(self._memory, self._table.arrays, name)


def _decode_table(content: bytes) -> _Table:
    try:
        return msgspec.json.decode(content, type=_Table)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArrayFileError(f"its table is damaged: {error}") from error


def _check_places(arrays: Collection[_Array], end: int) -> None:
    free = PAGE_BYTES
    for array in sorted(arrays, key=lambda each: each.offset):
        if array.dtype not in _DTYPES:
            raise ArrayFileError("its table names a dtype that is not known")
        if array.offset % PAGE_BYTES or array.offset < free:
            raise ArrayFileError("its table has an array that is not on pages of its own")
        free = array.end
    if free > end:
        raise ArrayFileError("its table has an array that ends beyond the file's arrays")


def _bytes_from(memory: mmap.mmap, arrays: dict[str, _Array], name: str) -> torch.Tensor:
    start = arrays[name].offset
    end = max(each.end for each in arrays.values())
    return _array(memory, _Array("uint8", [end - start], start))


def _array(memory: mmap.mmap, entry: _Array) -> torch.Tensor:
    dtype = _DTYPES[entry.dtype]
    with warnings.catch_warnings():
        # The memory cannot be written to, and nobody does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        count = math.prod(entry.shape)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
