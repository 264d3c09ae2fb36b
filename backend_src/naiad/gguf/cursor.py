"""Reads the parts of a GGUF header one after the other and never beyond the file's end."""

from __future__ import annotations

import struct
from typing import Any

_STRING, _ARRAY, _BOOL = 8, 9, 7
# The letter of each scalar type in struct's format strings.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_STRING_BYTES = 64 << 20
_LENGTH_BYTES = 8
# Ten times the largest vocabularies, one value for each token.
_MAX_VALUES = 1 << 22


class CursorError(Exception):
    """The header is damaged; the text says how."""


class Cursor:
    """A place in a header."""

    def __init__(self, data: memoryview) -> None:
        """Begin at the start of the file's bytes."""
        self._data = data
        self.place = 0

    def number(self, letter: str) -> Any:
        """Read one number of the type that this letter stands for in struct's format strings."""
        return self._unpack(f"<{letter}")[0]

    def text(self) -> str:
        """Read a string."""
        length = self.number("Q")
        if length > _MAX_STRING_BYTES:
            raise CursorError(f"a string of {length} bytes at byte {self.place} is too long")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError:
            raise CursorError(f"the string that ends at byte {self.place} is not UTF-8") from None

    def value(self) -> Any:
        """Read a type and a value of that type: a number, a string, or a list of either."""
        kind = self.number("I")
        return self._array() if kind == _ARRAY else self._scalar(kind)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        return self.number(self._letter(kind))

    def _array(self) -> list[Any]:
        kind, length = self.number("I"), self.number("Q")
        if kind == _STRING:
            # Each has a length at least, so a count that the file cannot hold is found before it is believed.
            self._check_room(length, _LENGTH_BYTES)
            return [self.text() for _ in range(length)]
        letter = self._letter(kind)
        self._check_room(length, struct.calcsize(letter))
        return list(self._unpack(f"<{length}{letter}"))

    def _letter(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CursorError(f"byte {self.place} is in a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _check_room(self, count: int, item_bytes: int) -> None:
        if count > _MAX_VALUES or count * item_bytes > len(self._data) - self.place:
            raise CursorError(f"{count} values at byte {self.place} do not fit in the file")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, num_bytes: int) -> memoryview:
        end = self.place + num_bytes
        if end > len(self._data):
            raise CursorError(f"{num_bytes} bytes at byte {self.place} do not fit in the file")
        taken = self._data[self.place : end]
        self.place = end
        return taken
