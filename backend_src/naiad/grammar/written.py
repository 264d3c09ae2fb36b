"""Grammars as llguidance reads them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from llguidance import LLMatcher

# Values stay as they were written: a schema may hold numbers that no Python type has.
Grammars: TypeAlias = list[dict[str, msgspec.Raw]]


class _Written(msgspec.Struct):
    grammars: Grammars


def lark_grammar(rules: str) -> Grammars:
    """A grammar of rules in Lark."""
    return [{"lark_grammar": raw(rules)}]


def json_grammar(schema: str) -> Grammars:
    """A grammar of JSON, whose keywords have been checked.

    There is one space after each colon and comma and no other blanks: models write it well, nobody can be
    made to write blanks without end, and most of what is between two values is known beforehand.
    """
    text = LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
    return msgspec.json.decode(text, type=_Written).grammars


def named(name: str, grammars: Grammars) -> Grammars:
    """The grammars, of which other ones can use the first by this name."""
    return [grammars[0] | {"name": raw(name)}, *grammars[1:]]


def raw(text: str) -> msgspec.Raw:
    """A text as JSON."""
    return msgspec.Raw(msgspec.json.encode(text))


def quoted(text: str) -> str:
    """A text as a string of Lark, which has JSON's escapes."""
    return msgspec.json.encode(text).decode()


def text_pattern(text: str) -> str:
    """The regular expression of a text."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)
