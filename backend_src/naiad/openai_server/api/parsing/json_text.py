"""Reads JSON as strictly as its standard, character by character."""

from __future__ import annotations

import json
import re

from naiad.openai_server.api.parsing.cursor import BrokenError, Cursor, Reading

MAX_DEPTH = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARACTERS = re.compile(r"[-+.eE0-9]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[a-z]*")
_WORDS = ("true", "false", "null")
_SIMPLE_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"


def read_value(cursor: Cursor, depth: int = 0) -> Reading[None]:
    """Read a value.

    Raises:
        BrokenError: there is none, or it is nested too deeply.
    """
    match (yield from cursor.peek()):
        case "{":
            yield from read_object(cursor, depth)
        case "[":
            yield from _read_array(cursor, depth)
        case '"':
            yield from read_string(cursor)
        case "t" | "f" | "n":
            if (yield from cursor.run(_LETTERS)) not in _WORDS:
                raise BrokenError
        case _:
            if not _NUMBER.fullmatch((yield from cursor.run(_NUMBER_CHARACTERS))):
                raise BrokenError


def read_object(cursor: Cursor, depth: int = 0) -> Reading[None]:
    """Read an object; the errors are those of `read_value`."""
    _check_depth(depth)
    yield from cursor.expect("{")
    yield from cursor.space()
    if (yield from cursor.sees("}")):
        return
    while True:
        yield from read_key(cursor)
        yield from read_value(cursor, depth + 1)
        if (yield from read_comma_or(cursor, "}")):
            return


def read_key(cursor: Cursor) -> Reading[str]:
    """Read a key, its colon and the white space around them; return the key."""
    yield from cursor.space()
    key = yield from read_string(cursor)
    yield from cursor.space()
    yield from cursor.expect(":")
    yield from cursor.space()
    return key


def read_comma_or(cursor: Cursor, closing: str) -> Reading[bool]:
    """Read white space and a comma, or what closes the object or list; return whether it was closed."""
    yield from cursor.space()
    if (yield from cursor.sees(closing)):
        return True
    yield from cursor.expect(",")
    return False


def read_string(cursor: Cursor) -> Reading[str]:
    """Read a string; return its value."""
    parts = ['"']
    yield from cursor.expect('"')
    while True:
        parts.append((yield from cursor.run(_PLAIN)))
        if (yield from cursor.sees('"')):
            return str(json.loads("".join([*parts, '"'])))
        yield from cursor.expect("\\")
        parts.append("\\" + (yield from _read_escape(cursor)))


def _read_array(cursor: Cursor, depth: int) -> Reading[None]:
    _check_depth(depth)
    yield from cursor.expect("[")
    yield from cursor.space()
    if (yield from cursor.sees("]")):
        return
    while True:
        yield from cursor.space()
        yield from read_value(cursor, depth + 1)
        if (yield from read_comma_or(cursor, "]")):
            return


def _read_escape(cursor: Cursor) -> Reading[str]:
    """What follows a backslash."""
    kind = yield from _read_one(cursor, _SIMPLE_ESCAPES + "u")
    if kind != "u":
        return kind
    digits = ""
    for _ in range(4):
        digits += yield from _read_one(cursor, _HEX)
    return kind + digits


def _read_one(cursor: Cursor, allowed: str) -> Reading[str]:
    character = yield from cursor.peek()
    if not character or character not in allowed:
        raise BrokenError
    cursor.at += 1
    return character


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise BrokenError
