"""Translates a client's grammar into llguidance's form."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from naiad.grammar.json_schema import schema_text
from naiad.grammar.special_tokens import with_ids
from naiad.grammar.structural_tag import structural_tag_grammars
from naiad.grammar.written import Grammars, json_grammar, lark_grammar, named, quoted, text_pattern
from naiad.sequence import GrammarKind, GrammarSpec

_BODY = "body"


def to_llguidance(spec: GrammarSpec, special_ids: Mapping[str, int]) -> str:
    """Translate a grammar; llguidance checks it when it compiles it.

    Args:
        spec: the grammar.
        special_ids: text → id of each special token.

    Raises:
        ValueError: the grammar cannot be translated; the message says why.
    """
    grammars = _translated(spec, special_ids)
    if spec.begins_after:
        before = _free_text_before(_BODY, spec, special_ids)
        grammars = [*lark_grammar(before), *named(_BODY, grammars)]
    return msgspec.json.encode({"grammars": grammars}).decode()


def _translated(spec: GrammarSpec, special_ids: Mapping[str, int]) -> Grammars:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return json_grammar(schema_text(spec.source))
        case GrammarKind.JSON_OBJECT:
            return json_grammar('{"type": "object"}')
        case GrammarKind.REGEX:
            return lark_grammar(f"start: {_regex(spec.source)}")
        case GrammarKind.CHOICE:
            return lark_grammar(f"start: {_choice(spec.source)}")
        case GrammarKind.EBNF:
            return lark_grammar(with_ids(_from_ebnf(spec.source), special_ids))
        case GrammarKind.LARK:
            return lark_grammar(with_ids(spec.source, special_ids))
        case GrammarKind.STRUCTURAL_TAG:
            return structural_tag_grammars(spec.source, special_ids.get)


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
    return " | ".join(quoted(each) for each in dict.fromkeys(texts))


def _from_ebnf(source: str) -> str:
    try:
        return any_to_lark(source)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 — the converter raises plain exceptions for what it cannot read
        raise ValueError(str(error)) from None


def _free_text_before(rule: str, spec: GrammarSpec, special_ids: Mapping[str, int]) -> str:
    """A grammar for any text up to the first marker, which `rule` follows."""
    pattern, marker_id = text_pattern(spec.begins_after), special_ids.get(spec.begins_after)
    if marker_id is None:
        before, terminal = "free", f"free[lazy]: /(?s:.*){pattern}/"
    else:
        # The text of the marker may also be made of ordinary tokens, which then do not count as free text.
        before, terminal = f"FREE? <[{marker_id}]>", f"FREE: /(?s:.+)/ & ~/(?s:.*){pattern}(?s:.*)/"
    if spec.opened_by:
        opening_id = special_ids.get(spec.opened_by)
        opening = quoted(spec.opened_by) if opening_id is None else f"<[{opening_id}]>"
        before = f"({opening} {before})?"
    return f"start: {before} @{rule}\n{terminal}\n"
