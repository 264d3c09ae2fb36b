"""Reads Python's literals, as models write them in calls. Nothing is ever evaluated."""

from __future__ import annotations

import json
import re

from naiad.openai_server.api.parsing.cursor import BrokenError, Cursor, Reading
from naiad.openai_server.api.parsing.json_text import MAX_DEPTH, read_comma_or

# What JSON can say.
Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]

_PLAIN = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_NUMBER_CHARACTERS = re.compile(r"[-+.eE0-9]*")
_NUMBER = re.compile(r"[-+]?(0+|[1-9][0-9]*|(?=\.))(\.[0-9]*)?([eE][-+]?[0-9]+)?")
# A longer number is no argument that anybody means.
_MAX_NUMBER_CHARACTERS = 400
_LETTERS = re.compile(r"[A-Za-z]*")
# Models mix Python's words with JSON's.
_WORDS: dict[str, Value] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}


def read_literal(cursor: Cursor, depth: int = 0) -> Reading[Value]:
    """Read a literal; a tuple becomes a list.

    Raises:
        BrokenError: there is none, or JSON can not say it, or it is nested too deeply.
    """
    if depth >= MAX_DEPTH:
        raise BrokenError
    match (yield from cursor.peek()):
        case "'" | '"':
            return (yield from _read_string(cursor))
        case "[":
            return (yield from _read_list(cursor, "[", "]", depth))
        case "(":
            return (yield from _read_list(cursor, "(", ")", depth))
        case "{":
            return (yield from _read_dict(cursor, depth))
        case character if character.isalpha():
            return _word((yield from cursor.run(_LETTERS)))
    return _number((yield from cursor.run(_NUMBER_CHARACTERS)))


def as_json(value: Value) -> str:
    """Write a value as JSON.

    Raises:
        BrokenError: a text holds half a surrogate pair, or a number is infinite, or it is nested too deeply.
    """
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        raise BrokenError from None
    return written


def _read_string(cursor: Cursor) -> Reading[str]:
    quote = yield from cursor.peek()
    cursor.at += 1
    parts = []
    while True:
        parts.append((yield from cursor.run(_PLAIN[quote])))
        if (yield from cursor.sees(quote)):
            return _unescaped("".join(parts))
        yield from cursor.expect("\\")
        parts.append("\\" + (yield from cursor.peek()))
        if (yield from cursor.peek()) == "":
            raise BrokenError
        cursor.at += 1


def _read_list(cursor: Cursor, opening: str, closing: str, depth: int) -> Reading[Value]:
    values: list[Value] = []
    yield from cursor.expect(opening)
    while not (yield from cursor.sees_after_space(closing)):
        yield from cursor.space()
        values.append((yield from read_literal(cursor, depth + 1)))
        if (yield from read_comma_or(cursor, closing)):
            break
    return values


def _read_dict(cursor: Cursor, depth: int) -> Reading[Value]:
    values: dict[str, Value] = {}
    yield from cursor.expect("{")
    while not (yield from cursor.sees_after_space("}")):
        yield from cursor.space()
        if (yield from cursor.peek()) not in ("'", '"'):
            raise BrokenError
        key = yield from _read_string(cursor)
        yield from cursor.space()
        yield from cursor.expect(":")
        yield from cursor.space()
        values[key] = yield from read_literal(cursor, depth + 1)
        if (yield from read_comma_or(cursor, "}")):
            break
    return values


def _word(word: str) -> Value:
    if word not in _WORDS:
        raise BrokenError
    return _WORDS[word]


def _number(written: str) -> Value:
    if len(written) > _MAX_NUMBER_CHARACTERS or not _NUMBER.fullmatch(written):
        raise BrokenError
    try:
        return int(written)
    except ValueError:
        pass
    try:
        number = float(written)
    except ValueError:
        raise BrokenError from None
    if number in (float("inf"), float("-inf")):
        raise BrokenError
    return number


def _unescaped(text: str) -> str:
    """What a string's source says; pairs of surrogates become the characters that they stand for."""
    said = _ESCAPE.sub(_said, text)
    return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in text else said


def _said(escape: re.Match[str]) -> str:
    byte, four, eight, octal, other = escape.groups()
    digits = byte or four or eight
    if digits is not None:
        code = int(digits, 16)
        return chr(code) if code <= 0x10FFFF else escape[0]
    if octal is not None:
        return chr(int(octal, 8))
    return _SIMPLE_ESCAPES.get(other, other if other in "\\'\"" else escape[0])
