"""Reads the tables of docs/compatibility.md, which have a row for each tensor of each model."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.doc_names import ROOT

_ROW = re.compile(r"^\| `(\w+)` \| (\w+)(\[[^\]]*\]) \| ([a-z ]+) \|(.*)\|$", re.MULTILINE)
_KINDS: dict[str, Any] = {
    "STRING": np.object_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class Row:
    """One tensor.

    Attributes:
        dims: dimensions without the batch dimension, as written on the page.
        status: served, refused, never sent or passed on.
        is_output: whether it is an output of the model.
    """

    name: str
    kind: str
    dims: str
    status: str
    note: str
    is_output: bool

    @property
    def dtype(self) -> Any:
        """The numpy dtype."""
        return np.dtype(_KINDS[self.kind])

    def array(self, value: Any, has_rows: bool) -> Any:
        """A tensor of this type with one row, or without the batch dimension if the model has none."""
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        array = np.array(items, dtype=self.dtype)
        return array[None] if has_rows else array

    def filled(self, has_rows: bool) -> Any:
        """A tensor of values that are not off; dimensions of any size have two entries."""
        shape = [2 if dim.strip() == "-1" else int(dim) for dim in self.dims[1:-1].split(",")]
        value = b"x" if self.kind == "STRING" else 2
        return np.full([1, *shape] if has_rows else shape, value, dtype=self.dtype)


@functools.cache
def page_rows(model: str) -> list[Row]:
    """The rows of a model's section, in order; inputs come before outputs."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    section = re.search(rf"^## `{model}`.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    inputs, _, outputs = section.group().partition("| output |")
    return [
        Row(name, kind, dims, status, note.strip(), is_output)
        for part, is_output in ((inputs, False), (outputs, True))
        for name, kind, dims, status, note in _ROW.findall(part)
    ]
