"""Text in which JSON stands between tags, and nothing else is asked of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from naiad.grammar.json_schema import schema_text
from naiad.grammar.written import Grammars, json_grammar, lark_grammar, named, quoted, text_pattern

# A special token's id; None: the text is ordinary.
SpecialId = Callable[[str], int | None]


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    # `schema` would hide a name of the library's.
    schema_: msgspec.Raw = msgspec.field(name="schema")
    end: str


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]


@dataclass(frozen=True, slots=True)
class _Tag:
    """A structure after its trigger.

    Attributes:
        trigger: index of the trigger that it begins with.
        rest: of its beginning, after the trigger.
    """

    trigger: int
    rest: str
    schema: str
    end: str


def structural_tag_grammars(source: str, special_id: SpecialId) -> Grammars:
    """Translate text, a trigger, JSON and an end, as often as the model likes, into llguidance's form.

    Args:
        source: JSON of `structures` and `triggers`, as vLLM has them.
        special_id: finds special tokens, which no ordinary text can be.

    Raises:
        ValueError: it is malformed, or a structure has no trigger, or a trigger no structure.
    """
    try:
        sent = msgspec.json.decode(source, type=_StructuralTag)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"expected structures and triggers: {error}") from None
    tags = [_tag(place, each, sent.triggers) for place, each in enumerate(sent.structures)]
    used = {tag.trigger for tag in tags}
    for index, trigger in enumerate(sent.triggers):
        if index not in used:
            raise ValueError(f"triggers[{index}] = {trigger[:80]!r} begins no structure")
    if not tags:
        raise ValueError("structures is empty: expected at least one")
    rules = "\n".join(_rules(tags, sent.triggers, special_id))
    schemas = [named(f"schema_{place}", json_grammar(tag.schema)) for place, tag in enumerate(tags)]
    return [*lark_grammar(rules), *(each for grammars in schemas for each in grammars)]


def _tag(place: int, structure: _Structure, triggers: Sequence[str]) -> _Tag:
    begin = structure.begin
    # Of two triggers that begin a structure the shorter one is complete first.
    fitting = [(len(each), index) for index, each in enumerate(triggers) if each and begin.startswith(each)]
    if not fitting:
        raise ValueError(f"structures[{place}].begin = {begin[:80]!r} begins with no trigger")
    length, index = min(fitting)
    try:
        schema = schema_text(bytes(structure.schema_).decode())
    except ValueError as error:
        raise ValueError(f"structures[{place}].schema: {error}") from None
    return _Tag(index, begin[length:], schema, structure.end)


def _rules(tags: Sequence[_Tag], triggers: Sequence[str], special_id: SpecialId) -> list[str]:
    parts = " | ".join(f"part_{index}" for index in range(len(triggers)))
    rules = [f"start: ({parts})* TEXT?", "TEXT: /(?s:.+)/"]
    for index, trigger in enumerate(triggers):
        bodies = " | ".join(f"tag_{place}" for place, tag in enumerate(tags) if tag.trigger == index)
        rules.append(f"part_{index}: before_{index} ({bodies})")
        token_id = special_id(trigger)
        if token_id is None:
            rules.append(f"before_{index}[lazy]: /(?s:.*){text_pattern(trigger)}/")
        else:
            rules.append(f"before_{index}: TEXT? <[{token_id}]>")
    for place, tag in enumerate(tags):
        written = (_piece(tag.rest, special_id), f"@schema_{place}", _piece(tag.end, special_id))
        rules.append(f"tag_{place}: {' '.join(filter(None, written))}")
    return rules


def _piece(text: str, special_id: SpecialId) -> str:
    if not text:
        return ""
    token_id = special_id(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"
