"""Array files that somebody has changed: with right hashes, and tables or arrays that do not fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from naiad.models.array_file import _HEADER, PAGE_BYTES, ArrayFile, ArrayWriter

Arrays = dict[str, torch.Tensor]
Notes = dict[str, dict[str, Any]]


def table_of(path: Path) -> dict[str, Any]:
    """The table of an array file."""
    content = path.read_bytes()
    _, _, offset, size, _ = _HEADER.unpack(content[: _HEADER.size])
    return dict(json.loads(content[offset : offset + size]))


def replace_table(path: Path, table: bytes) -> None:
    """Give an array file another table, and hashes of that."""
    content = path.read_bytes()
    magic, version, offset, _, _ = _HEADER.unpack(content[: _HEADER.size])
    rest = content[PAGE_BYTES:offset] + table
    header = _HEADER.pack(magic, version, offset, len(table), hashlib.sha256(rest).digest())
    start = header + hashlib.sha256(header).digest()
    path.write_bytes(start.ljust(PAGE_BYTES, b"\0") + rest)


def rewrite(path: Path, change: Callable[[Arrays, Notes], None]) -> None:
    """Write an array file again with other arrays and notes, under its key.

    Args:
        path: the file, which is replaced.
        change: changes the arrays and the notes in place.
    """
    file = ArrayFile(path)
    arrays, notes = {name: file.array(name).clone() for name in file.names}, dict(file.notes)
    change(arrays, notes)
    path.unlink()
    with path.open("w+b") as opened:
        writer = ArrayWriter(opened, file.key, 1 << 24)
        for name, array in arrays.items():
            writer.add(name, array.contiguous())
        writer.notes.update(notes)
        writer.finish()
