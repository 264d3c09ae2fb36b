"""Translates a client's grammar into llguidance's form."""

from __future__ import annotations

import re

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from naiad.grammar.json_schema import read_schema
from naiad.sequence import GrammarKind, GrammarSpec

# Values stay as they were written: a schema may hold numbers that no Python type has.
_Grammars = list[dict[str, msgspec.Raw]]
_BODY = "body"


class _Written(msgspec.Struct):
    grammars: _Grammars


def to_llguidance(spec: GrammarSpec, marker_id: int | None = None) -> str:
    """Translate a grammar; llguidance checks it when it compiles it.

    Args:
        spec: the grammar.
        marker_id: the special token that `spec.begins_after` is; None: it is ordinary text.

    Raises:
        ValueError: the grammar cannot be translated; the message says why.
    """
    grammars = _translated(spec)
    if spec.begins_after:
        grammars[0]["name"] = _raw(_BODY)
        grammars = [*_lark(_free_text_before(_BODY, spec.begins_after, marker_id)), *grammars]
    return msgspec.json.encode({"grammars": grammars}).decode()


def _translated(spec: GrammarSpec) -> _Grammars:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json("{}" if read_schema(spec.source) is True else spec.source)
        case GrammarKind.JSON_OBJECT:
            return _json('{"type": "object"}')
        case GrammarKind.REGEX:
            return _lark(f"start: {_regex(spec.source)}")
        case GrammarKind.CHOICE:
            return _lark(f"start: {_choice(spec.source)}")
        case GrammarKind.EBNF:
            return _lark(_from_ebnf(spec.source))
        case GrammarKind.LARK:
            return _lark(spec.source)


def _lark(rules: str) -> _Grammars:
    return [{"lark_grammar": _raw(rules)}]


def _json(schema: str) -> _Grammars:
    # One space after each colon and comma and no other blanks: models write it well, nobody can be made to
    # write blanks without end, and most of what is between two values is known beforehand.
    text = LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
    return msgspec.json.decode(text, type=_Written).grammars


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text))


def _regex(source: str) -> str:
    """Write a regular expression as a terminal of Lark, which slashes delimit."""
    if not source:
        return '""'
    escaped = re.sub(r"\\.|/|\n", _escaped, source, flags=re.DOTALL)
    return f"/{escaped}/"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found.group(), found.group())


def _choice(source: str) -> str:
    try:
        texts = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise ValueError("expected a list of texts") from None
    if not texts:
        raise ValueError("the list is empty: expected at least one text")
    return " | ".join(_text(each) for each in dict.fromkeys(texts))


def _from_ebnf(source: str) -> str:
    try:
        return any_to_lark(source)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 — the converter raises plain exceptions for what it cannot read
        raise ValueError(str(error)) from None


def _text(text: str) -> str:
    """Write a text as a string of Lark, which has JSON's escapes."""
    return msgspec.json.encode(text).decode()


def _free_text_before(rule: str, marker: str, marker_id: int | None) -> str:
    """A grammar for any text up to the first marker, which `rule` follows."""
    pattern = "".join(f"\\x{{{ord(char):x}}}" for char in marker)
    if marker_id is None:
        return f"start: free @{rule}\nfree[lazy]: /(?s:.*){pattern}/\n"
    # The text of the marker may also be made of ordinary tokens, which then do not count as free text.
    return f"start: FREE? <[{marker_id}]> @{rule}\nFREE: /(?s:.+)/ & ~/(?s:.*){pattern}(?s:.*)/\n"
