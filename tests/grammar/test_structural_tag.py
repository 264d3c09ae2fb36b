"""Text in which JSON stands between tags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from helpers.grammars import ids_with_special, tiny_grammars
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.errors import InvalidRequestError
from naiad.grammar import Grammars
from naiad.sequence import GrammarKind, GrammarSpec

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBER = {"type": "integer", "minimum": 1, "maximum": 12}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())
    with closing(tiny_grammars(folder)) as made:
        yield made


def tag(structures: list[tuple[str, Any, str]], triggers: list[str], begins_after: str = "") -> GrammarSpec:
    written = [{"begin": begin, "schema": schema, "end": end} for begin, schema, end in structures]
    source = json.dumps({"structures": written, "triggers": triggers})
    return GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, source=source, begins_after=begins_after)


FUNCTIONS = tag(
    [
        ("<function=weather>", CITY, "</function>"),
        ("<function=month>", NUMBER, "</function>"),
        ("#", NUMBER, ""),
    ],
    ["<function=", "#"],
)


def accepts(grammars: Grammars, spec: GrammarSpec, text: str) -> bool:
    matcher = grammars.get(spec).matcher()
    matcher.advance(ids_with_special(grammars, text))
    return matcher.is_complete


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no tag at all, {not json",
        "<function",
        '<function=weather>{"city": "Rome"}</function>',
        'Let me see.\n<function=weather>{"city": "Oslo"}</function> and <function=month>7</function>.',
        "#7 <#1",
    ],
)
def test_text_is_free_and_tags_hold_what_they_should(grammars: Grammars, text: str) -> None:
    assert accepts(grammars, FUNCTIONS, text)


@pytest.mark.parametrize(
    "text",
    [
        "<function=",
        "<function=other>{}</function>",
        "<function=month>13</function>",
        "<function=month>7",
        "<function=month>7</function ",
        '<function=weather>{"city": 7}</function>',
        "x #y",
    ],
)
def test_a_trigger_begins_one_of_its_tags(grammars: Grammars, text: str) -> None:
    assert not accepts(grammars, FUNCTIONS, text)


def test_triggers_and_ends_may_be_special_tokens(grammars: Grammars) -> None:
    spec = tag([("<|im_start|>month ", NUMBER, "<s>")], ["<|im_start|>"])
    assert accepts(grammars, spec, "say <|im_start|>month 7<s> or <|im_start|>month 8<s>")
    assert not accepts(grammars, spec, "say <|im_start|>year 7<s>")
    assert not accepts(grammars, spec, "say <|im_start|>month 7")


def test_it_may_begin_after_a_text(grammars: Grammars) -> None:
    spec = tag([("<n>", NUMBER, "</n>")], ["<n>"], begins_after="</think>")
    assert accepts(grammars, spec, "a <n>99</n> thought</think>It is <n>7</n>")
    assert not accepts(grammars, spec, "</think>It is <n>99</n>")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tag([("<a>", NUMBER, "")], ["<b>"]), r"structures\[0\]\.begin = '<a>' begins with no trigger"),
        (tag([("<a>", NUMBER, "")], ["<a", "<b"]), r"triggers\[1\] = '<b' begins no structure"),
        (tag([("<a>", {"fooBar": 1}, "")], ["<a"]), r"structures\[0\]\.schema: unknown keyword 'fooBar'"),
        (tag([("<a>", {"not": {}}, "")], ["<a"]), "not"),
        (tag([("<a>", {"type": ["integer", "number"], "maximum": 2**63 - 1}, "")], ["<a"]), "maximum = 92"),
        (tag([("<a>", {"const": 2**63}, "")], ["<a"]), r"structures\[0\]\.schema: const = 92"),
        (tag([], []), "structures is empty"),
        (GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, source="{}"), "expected structures and triggers"),
    ],
)
def test_what_is_wrong_is_named(grammars: Grammars, spec: GrammarSpec, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        grammars.get(spec)
