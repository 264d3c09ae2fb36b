"""Tool calls are found in outputs, in the same way however those are divided."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.called_tools import CASES, FAMILY, TOOLS, Case, Heard, cut, heard, parser_for
from naiad.openai_server.api.parsing.call_finder import MAX_HELD_CHARS, CallRules
from naiad.openai_server.api.parsing.families import CALL_CHOICES, CALL_FAMILIES, FamilyChoices
from naiad.openai_server.api.parsing.json_text import MAX_DEPTH
from naiad.openai_server.api.parsing.output_parser import OutputGrammar, OutputParser, Section, grammar_of
from naiad.openai_server.api.parsing.pieces import Piece


def expect(found: Heard, case: Case) -> None:
    assert found.calls == list(case.calls)
    assert (found.content, found.reasoning) == (case.content, case.reasoning)
    for _, arguments in found.calls:
        assert isinstance(json.loads(arguments), dict)


def divisions(text: str) -> Iterator[list[Piece]]:
    """Every division into one, two or three tokens, and into characters."""
    for num_cuts in (0, 1, 2):
        for places in itertools.combinations(range(1, len(text)), num_cuts):
            yield cut(text, places)
    yield cut(text, range(1, len(text)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.text}")
def test_every_division_says_the_same(case: Case) -> None:
    for pieces in divisions(case.text):
        expect(heard(parser_for(case.family), [[piece] for piece in pieces]), case)
    expect(heard(parser_for(case.family), [cut(case.text, range(1, len(case.text))), []]), case)


@pytest.mark.parametrize("family", FAMILY)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_texts_say_the_same_however_they_are_divided(family: str, data: st.DataObject) -> None:
    """Texts are made of parts of the corpus, whole calls and broken ones; nothing of them is lost."""
    texts = [case.text for case in CASES if case.family == family]
    marks = [*FAMILY[family].marks, "{", "[", '"', "}", "]", "\\", "\n", " ", "<", "é😀"]
    part = (
        st.sampled_from(texts) | st.sampled_from(marks) | st.sampled_from(texts).map(lambda text: text[:-3])
    )
    text = "".join(data.draw(st.lists(part, max_size=5)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    certain = data.draw(st.booleans())
    whole = heard(parser_for(family, are_certain=certain), [cut(text, [])])
    pieces = cut(text, places)
    for deltas in ([[piece] for piece in pieces], [pieces, []], [cut(text, range(1, len(text)))]):
        found = heard(parser_for(family, are_certain=certain), deltas)
        assert (found.content, found.reasoning, found.calls) == (whole.content, whole.reasoning, whole.calls)
    said = whole.content + whole.reasoning + "".join(arguments for _, arguments in whole.calls)
    if not whole.calls and not whole.reasoning and "<think>" not in text:
        assert said == text


@pytest.mark.parametrize("case", [case for case in CASES if case.calls], ids=lambda case: case.text)
def test_certain_calls_are_reported_as_they_come_and_are_the_same(case: Case) -> None:
    pieces = cut(case.text, range(1, len(case.text)))
    expect(heard(parser_for(case.family, are_certain=True), [[piece] for piece in pieces]), case)


def test_arguments_of_certain_calls_come_in_fragments() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "long"}}</tool_call>'
    parser = parser_for("hermes", are_certain=True)
    deltas = [parser.parse_delta([piece], finished=False).calls for piece in cut(text, range(1, len(text)))]
    names = [call.name for calls in deltas for call in calls if call.name]
    fragments = [call.arguments for calls in deltas for call in calls if call.arguments]
    assert names == ["f"]
    assert fragments == list('{"a": "long"}')


def test_a_certain_call_that_is_cut_off_keeps_its_arguments_so_far() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "Par'
    for pieces in divisions(text):
        found = heard(parser_for("hermes", are_certain=True), [[piece] for piece in pieces])
        assert (found.content, found.calls) == ("", [("f", '{"a": "Par')])


# Every family with an end mark, and a call up to its complete arguments.
WHOLE_CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>",
    "phi4_mini_json": '<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]',
    "pythonic": "<|python_start|>[f(a='x')]",
}


def test_the_calls_have_every_family_with_an_end_mark() -> None:
    assert set(WHOLE_CALLS) == {family.name for family in CALL_FAMILIES if family.end}


@pytest.mark.parametrize("are_certain", [True, False])
@pytest.mark.parametrize("family", WHOLE_CALLS)
def test_a_beginning_of_the_end_mark_is_no_content(family: str, are_certain: bool) -> None:
    end = f"\n{FAMILY[family].end}"
    for size in range(len(end) + 1):
        text = f"Look.{WHOLE_CALLS[family]}{end[:size]}"
        for pieces in (cut(text, []), cut(text, range(1, len(text)))):
            for deltas in ([pieces], [[piece] for piece in pieces], [pieces, []]):
                found = heard(parser_for(family, are_certain=are_certain), deltas)
                assert (found.content, found.calls) == ("Look.", [("f", '{"a": "x"}')]), text
        parser = parser_for(family, are_certain=are_certain)
        assert not parser.parse_delta(cut(text, []), finished=True).has_open_call


@pytest.mark.parametrize(
    ("family", "text", "is_open"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "Par', True),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {"a"',
            True,
        ),
        # Too deep to be read to its end.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * (MAX_DEPTH + 1) + "1", True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}}', False),
        # What there is of it is content.
        ("hermes", '<tool_call>\n{"name": "f", "argum', True),
        ("hermes", "<tool_call>", True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f', True),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"na', True),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]', False),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nPar", True),
        ("qwen3_coder", "<tool_call>\n<func", True),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>", False),
        ("pythonic", "[f(a='Par", True),
        ("pythonic", "[f(n=1), f(a='Par", True),
        ("pythonic", "[f(n=1)]", False),
        ("hermes", "Hello", False),
        ("hermes", "Hello <tool_", False),
        # It is known to be none before the end.
        ("hermes", '<tool_call>{"name": "g", "argum', False),
    ],
)
def test_whether_a_call_is_open_is_known_at_the_end(family: str, text: str, is_open: bool) -> None:
    for pieces in (cut(text, range(1, len(text))), cut(text, [])):
        parser = parser_for(family, are_certain=True)
        for piece in pieces[:-1]:
            assert not parser.parse_delta([piece], finished=False).has_open_call
        assert parser.parse_delta(pieces[-1:], finished=True).has_open_call is is_open


def test_a_call_without_a_grammar_that_is_cut_off_is_content() -> None:
    text = '<tool_call>\n{"name": "f", "argum'
    assert not parser_for("hermes").parse_delta(cut(text, []), finished=True).has_open_call


def test_a_call_that_is_left_out_is_not_open() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {"a"'
    for left_out in (text, text[:-20]):
        parser = parser_for("hermes", are_certain=True, max_calls=1)
        assert not parser.parse_delta(cut(left_out, []), finished=True).has_open_call


def test_tokens_of_calls_are_no_tokens_of_the_content() -> None:
    texts = ["Hi", " <tool", "_call>", '{"name": "f"', "}", "</tool_call> ", "", "Bye"]
    pieces = [Piece(text, number) for number, text in enumerate(texts)]
    for deltas in ([pieces], [[piece] for piece in pieces], [[piece] for piece in pieces] + [[]]):
        found = heard(parser_for("hermes"), deltas)
        # The token that ends the call has the space before "Bye".
        assert (found.content, found.content_ids) == ("Hi  Bye", [0, 1, 5, 6, 7])


def test_tokens_of_a_broken_call_are_the_contents() -> None:
    pieces = cut("<tool_call>{broken", range(1, 18))
    assert heard(parser_for("hermes"), [pieces]).content_ids == list(range(18))


def test_further_calls_are_left_out_if_only_one_is_wanted() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "get-time"}</tool_call> end'
    found = heard(parser_for("hermes", max_calls=1), [cut(text, [])])
    assert (found.calls, found.content) == ([("f", "{}")], " end")


def test_a_call_that_is_too_long_is_content() -> None:
    for size, is_call in ((MAX_HELD_CHARS - 100, True), (MAX_HELD_CHARS, False)):
        text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * size + '"}}</tool_call>'
        for places in ([], [20], list(range(1000, len(text), 1000))):
            found = heard(parser_for("hermes"), [[piece] for piece in cut(text, places)])
            assert bool(found.calls) is is_call
            assert found.content == ("" if is_call else text)


def test_a_certain_call_may_be_longer() -> None:
    arguments = '{"a": "' + "x" * 2 * MAX_HELD_CHARS + '"}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    pieces = cut(text, range(1000, len(text), 1000))
    found = heard(parser_for("hermes", are_certain=True), [[piece] for piece in pieces])
    assert (found.content, found.calls) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    ("family", "begin", "end"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "}}</tool_call>"),
        ("pythonic", "[f(a=", ")]"),
    ],
)
def test_values_are_nested_up_to_a_limit(family: str, begin: str, end: str) -> None:
    for depth, is_call in ((MAX_DEPTH - 2, True), (MAX_DEPTH + 1, False), (50_000, False)):
        text = begin + "[" * depth + "]" * depth + end
        found = heard(parser_for(family), [cut(text, [])])
        assert bool(found.calls) is is_call, depth
        assert is_call or found.content == text


def test_ids_are_those_of_the_family() -> None:
    text = {"mistral": "[TOOL_CALLS]f{}", "hermes": '<tool_call>{"name": "f"}'}
    (short,) = heard(parser_for("mistral"), [cut(text["mistral"], [])]).ids
    (other,) = heard(parser_for("hermes"), [cut(text["hermes"], [])]).ids
    assert len(short) == 9
    assert short.isalnum()
    assert other.startswith("call_")


def test_marks_that_are_special_tokens_have_no_text_of_their_own() -> None:
    family = FAMILY["mistral"]
    grammar = OutputGrammar(None, family, {90: "[TOOL_CALLS]", 91: "[ARGS]"})
    pieces = [Piece("", 90), Piece("f", 1), Piece("", 91), Piece("{}", 2), Piece("", 3)]
    for deltas in ([pieces], [[piece] for piece in pieces]):
        parser = OutputParser(grammar, Section.CONTENT, CallRules(family=family, tools=TOOLS))
        found = heard(parser, deltas)
        assert (found.calls, found.content) == ([("f", "{}")], "")
    # Without tools they are what they always are.
    assert heard(OutputParser(grammar), [pieces]).content == "f{}"


def test_names_are_different() -> None:
    assert len(FAMILY) == len(CALL_FAMILIES)


def test_the_corpus_has_every_family() -> None:
    assert {case.family for case in CASES} == set(FAMILY)
    for name in FAMILY:
        cases = [case for case in CASES if case.family == name]
        assert any(case.calls for case in cases)
        assert any(case.content == case.text for case in cases)


@dataclass
class Words:
    chat_template: str | None = None
    ids: dict[str, int] = field(default_factory=dict)

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def is_special(self, token_id: int) -> bool:
        return token_id >= 90


TEMPLATES = {
    "hermes": "{{ tools }} return each call within <tool_call></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=a>\n</parameter></function>\n</tool_call>",
    "mistral": "[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS] [",
    "granite": "respond with <|tool_call|> followed by a JSON list of tools used",
    "phi4_mini_json": "<|tool|>{{ message['tools'] }}<|/tool|>",
    "llama3_json": 'Respond with {"name": name, "parameters": dictionary of argument name and its value}',
    "pythonic": "Respond in the format [func_name1(params_name1=params_value1, ...), func_name2(params)]",
}


@pytest.mark.parametrize("family", FAMILY)
def test_the_family_is_that_of_the_chat_template(family: str) -> None:
    assert grammar_of(Words(TEMPLATES[family])).calls is FAMILY[family]


def test_the_family_can_be_chosen() -> None:
    words = Words(TEMPLATES["hermes"], {"[TOOL_CALLS]": 90, "<tool_call>": 5})
    assert grammar_of(Words("{{ messages }}")).calls is None
    assert grammar_of(words, FamilyChoices(calls="none")).calls is None
    chosen = grammar_of(words, FamilyChoices(calls="mistral"))
    assert chosen.calls is FAMILY["mistral"]
    assert (chosen.marks, chosen.special_ids) == ({90: "[TOOL_CALLS]"}, {90})
    assert set(CALL_CHOICES) == {"auto", "none", *FAMILY}
