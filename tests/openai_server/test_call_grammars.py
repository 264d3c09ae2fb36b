"""Every text that the grammar of calls allows is read as correct calls."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helpers.call_vocabulary import (
    BOTH,
    CALLED,
    NOW,
    SCHEMA,
    WEATHER,
    Vocabulary,
    parse,
    replace_marks,
    spec_of,
)
from helpers.called_tools import FAMILY, Heard
from naiad.openai_server.api.chat_prompt import ChatPrompt
from naiad.openai_server.api.constraints.arguments import closed
from naiad.openai_server.api.constraints.constraint import Constraint
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.families import CALL_FAMILIES, CallForm
from naiad.openai_server.api.parsing.output_parser import Section
from naiad.openai_server.api.tools import ToolUse
from naiad.sequence import GrammarKind, GrammarSpec
from naiad.tokenization import PLAIN_CHAT

# Without free text, which random tokens hardly ever end.
WORDS = replace(
    WEATHER, parameters={**SCHEMA, "properties": {**SCHEMA["properties"], "city": {"enum": ["R"]}}}
)
NUM_WALKS = 12


def expect_valid(found: Heard) -> None:
    for name, arguments in found.calls:
        jsonschema.validate(json.loads(arguments), dict(closed(CALLED[name])))


SPECIAL = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "granite": ("<|tool_call|>",),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
}
CHECKPOINTS = [(family.name, False) for family in CALL_FAMILIES] + [(name, True) for name in SPECIAL]


@pytest.mark.parametrize(("family", "is_special"), CHECKPOINTS)
def test_random_texts_of_required_calls_are_calls(tmp_path: Path, family: str, is_special: bool) -> None:
    vocabulary = Vocabulary(tmp_path, SPECIAL[family] if is_special else ())
    outputs, draw, num_read = vocabulary.outputs(family), random.Random(5), 0
    for allows_several in (True, False):
        tools = (WORDS, NOW) if FAMILY[family].form is CallForm.XML else BOTH
        spec = spec_of(outputs, tools=tools, is_required=True, allows_several=allows_several)
        assert spec is not None
        for _ in range(NUM_WALKS):
            text = vocabulary.walk(spec, draw)
            if text is None:
                continue
            num_read += 1
            found = parse(outputs, text)
            assert found.content == "", text
            assert len(found.calls) >= 1 if allows_several else len(found.calls) == 1, text
            expect_valid(found)
    assert num_read > NUM_WALKS


@pytest.mark.parametrize(("family", "is_special"), CHECKPOINTS)
def test_random_texts_with_strict_tools_have_correct_calls(
    tmp_path: Path, family: str, is_special: bool
) -> None:
    vocabulary = Vocabulary(tmp_path, SPECIAL[family] if is_special else ())
    outputs, draw = vocabulary.outputs(family), random.Random(6)
    is_strict = FAMILY[family].form is not CallForm.XML
    tools = (replace(WEATHER, is_strict=is_strict), replace(NOW, is_strict=True))
    spec = spec_of(outputs, tools=tools)
    assert spec is not None
    assert vocabulary.accepts(spec, "Hello")
    assert vocabulary.accepts(spec, "")
    for _ in range(NUM_WALKS):
        text = vocabulary.walk(spec, draw)
        if text is not None:
            expect_valid(parse(outputs, text))


OTHER = dict.fromkeys(("hermes", "qwen3_coder"), ("<tool_call>", "</tool_call>", "<think>", "</think>"))


@pytest.mark.parametrize("family", OTHER)
@pytest.mark.parametrize("is_required", [True, False])
def test_marks_that_are_added_tokens_may_be_those_or_spelled(
    tmp_path: Path, family: str, is_required: bool
) -> None:
    """As in checkpoints of the Qwen family, whose marks are no special tokens."""
    vocabulary = Vocabulary(tmp_path, other=OTHER[family])
    outputs, draw, num_read = vocabulary.outputs(family), random.Random(7), 0
    strict = {"tools": (replace(WORDS, is_strict=family == "hermes"), replace(NOW, is_strict=True))}
    spec = spec_of(outputs, **({"tools": (WORDS, NOW), "is_required": True} if is_required else strict))
    assert spec is not None
    matcher = vocabulary.matcher(spec)
    (mark_id,) = (each for each, mark in vocabulary.marks.items() if mark == "<tool_call>")
    spelled = vocabulary.llguidance.tokenize_str("<tool_call>")
    assert matcher.validate_tokens([mark_id]) == 1
    assert matcher.validate_tokens(spelled) == len(spelled)
    for _ in range(NUM_WALKS):
        text = vocabulary.walk(spec, draw)
        if text is not None:
            num_read += 1
            expect_valid(parse(outputs, text))
    assert num_read > 0


def test_free_text_spells_no_mark_that_is_an_added_token(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, other=OTHER["hermes"])
    spec = spec_of(vocabulary.outputs("hermes"), tools=(replace(WEATHER, is_strict=True), NOW))
    assert spec is not None
    for text, is_allowed in ((f"Look.\n{GOOD}\n{NOTHING} done", True), (f"Look.\n{BAD}", False), ("x", True)):
        # As tokens, and spelled.
        for marks in (vocabulary.marks, {}):
            read = replace_marks(vocabulary, marks)
            assert read.accepts(spec, text) is is_allowed, (text, marks)


@pytest.mark.parametrize("family", SPECIAL)
def test_a_mark_that_is_a_special_token_may_be_spelled(tmp_path: Path, family: str) -> None:
    """A reader takes it for the mark, so what follows has to be a correct call as well."""
    vocabulary = Vocabulary(tmp_path, SPECIAL[family])
    outputs = vocabulary.outputs(family)
    spec = spec_of(outputs, tools=(replace(NOW, is_strict=True),))
    assert spec is not None
    writing, spelled = outputs.writing, replace_marks(vocabulary, {})
    for arguments, is_allowed in (("{}", True), ('{"city": 5}', False)):
        call = f"{writing.opening}a.b/now-1{writing.before_arguments}{arguments}{writing.after_arguments}"
        ids = spelled.ids(f"So: {writing.begin}") + vocabulary.ids(f"{call}{writing.closing}")
        matcher = vocabulary.matcher(spec)
        is_accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert is_accepted is is_allowed


WRONG = '{{"name": "get_weather", "{}": {{"city": 5}}}}'


@pytest.mark.parametrize(
    ("family", "mark", "call"),
    [
        ("llama3_json", "<|python_tag|>", WRONG.format("parameters")),
        ("pythonic", "<|python_start|>", "[get_weather(city=5)]"),
    ],
)
def test_behind_a_mark_that_no_grammar_writes_there_is_no_call(
    tmp_path: Path, family: str, mark: str, call: str
) -> None:
    vocabulary = Vocabulary(tmp_path)
    outputs, text = vocabulary.outputs(family), f"So: {mark}{call}"
    tools = (replace(WEATHER, is_strict=True),)
    assert vocabulary.accepts(spec_of(outputs, tools=tools), text)
    found = parse(outputs, text)
    assert (found.calls, found.content) == ([], text)
    for use, begins in (
        (ToolUse(tools=tools, callable=tools), outputs.guarded_calls),
        (ToolUse(tools=BOTH, callable=BOTH), outputs.calls),
    ):
        rules = ChatPrompt([], PLAIN_CHAT, use).call_rules(outputs)
        assert rules is not None
        assert rules.family == begins
        assert (mark in rules.family.begins) is (use.tools == BOTH)


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(
    ("family", "mark", "closing"),
    [
        ("granite", "<tool_call>", ""),
        ("granite", "<|tool_call|>", ""),
        ("phi4_mini_json", "functools", ""),
        ("phi4_mini_json", "<|tool_call|>", "<|/tool_call|>"),
    ],
)
def test_behind_every_mark_of_a_family_calls_are_correct_and_read(
    tmp_path: Path, family: str, mark: str, closing: str, is_special: bool
) -> None:
    """A model does not always write the mark that its vocabulary has as a token."""
    vocabulary = Vocabulary(tmp_path, SPECIAL[family] if is_special else ())
    outputs, given = vocabulary.outputs(family), '{"city": "Rome", "all": true}'
    good = f'{{"name": "get_weather", "arguments": {given}}}'
    for allows_several in (True, False):
        tools = (replace(WEATHER, is_strict=True), NOW)
        spec = spec_of(outputs, tools=tools, allows_several=allows_several)
        calls = (good, good)[: 1 + allows_several]
        text = f"So: {mark}[{', '.join(calls)}]{closing}"
        assert vocabulary.accepts(spec, text)
        found = parse(outputs, text)
        assert (found.calls, found.content) == ([("get_weather", given)] * len(calls), "So: ")
        assert not vocabulary.accepts(spec, f"So: {mark}[{WRONG.format('arguments')}]{closing}")
        assert vocabulary.accepts(spec, f"So: {mark}[{good}]{closing} And.") is allows_several
        for other in outputs.calls.begins if outputs.calls is not None and allows_several else ():
            assert not vocabulary.accepts(spec, f"{text} {other}[{WRONG.format('arguments')}]")


def test_a_mark_that_is_a_word_may_stand_in_text(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, SPECIAL["phi4_mini_json"])
    outputs = vocabulary.outputs("phi4_mini_json")
    spec = spec_of(outputs, tools=(replace(WEATHER, is_strict=True),))
    for text in ("Write import functools\n\n@functools.cache", "functools", "functools ["):
        assert vocabulary.accepts(spec, text)
        assert parse(outputs, text).content == text
    assert not vocabulary.accepts(spec, "functools[")


@pytest.mark.parametrize(("family", "is_special"), CHECKPOINTS)
def test_behind_every_mark_a_call_is_written_alike(tmp_path: Path, family: str, is_special: bool) -> None:
    """So its rule is in a grammar once."""
    outputs = Vocabulary(tmp_path, SPECIAL[family] if is_special else ()).outputs(family)
    assert len({(each.before_arguments, each.after_arguments) for each in outputs.writings}) == 1
    assert outputs.writing == outputs.writings[0]


def hermes(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD, BAD = hermes('{"city": "Rome", "all": true}'), hermes('{"city": "Rome"}')
NOTHING = hermes("{}", "a.b/now-1")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("plain"))


def test_required_calls(plain: Vocabulary) -> None:
    outputs = plain.outputs("hermes")
    spec = spec_of(outputs, is_required=True)
    for text, is_allowed in (
        (GOOD, True),
        (f"{GOOD}\n{NOTHING}", True),
        (BAD, False),
        ("Hello", False),
        ("", False),
        (f"Hello {GOOD}", False),
        (f"{GOOD} Hello", False),
        (hermes("{}", "other"), False),
        (hermes('{"a": 1}', "a.b/now-1"), False),
    ):
        assert plain.accepts(spec, text) is is_allowed, text
    single = spec_of(outputs, is_required=True, allows_several=False)
    assert plain.accepts(single, GOOD)
    assert not plain.accepts(single, f"{GOOD}\n{NOTHING}")


def test_a_named_call(plain: Vocabulary) -> None:
    use = ToolUse(tools=BOTH, callable=(NOW,), is_required=True, allows_several=False)
    spec = Constraint(plain.outputs("hermes"), use, None).spec(Section.CONTENT)
    assert plain.accepts(spec, NOTHING)
    assert not plain.accepts(spec, GOOD)


def test_strict_tools_leave_text_free(plain: Vocabulary) -> None:
    strict = (replace(WEATHER, is_strict=True), NOW)
    spec = spec_of(plain.outputs("hermes"), tools=strict)
    for text, is_allowed in (
        ("Hello <tool {", True),
        (f"Look.\n{GOOD}\n{NOTHING} done", True),
        (f"Look.\n{BAD}", False),
        ("<tool_call>", False),
        (f"{GOOD}<tool_call>x", False),
    ):
        assert plain.accepts(spec, text) is is_allowed, text
    single = spec_of(plain.outputs("hermes"), tools=strict, allows_several=False)
    assert plain.accepts(single, f"Look.\n{GOOD}")
    assert not plain.accepts(single, f"{GOOD}\n{NOTHING}")


def test_calls_without_marks_begin_the_answer(plain: Vocabulary) -> None:
    spec = spec_of(plain.outputs("llama3_json"), tools=(replace(NOW, is_strict=True),))
    for text, is_allowed in (
        ('{"name": "a.b/now-1", "parameters": {}}', True),
        ("Hello {", True),
        ('{"name": "x"}', False),
        (' {"name": "x"}', False),
    ):
        assert plain.accepts(spec, text) is is_allowed, text


@pytest.mark.parametrize("kind", ["required", "strict", "form"])
def test_what_is_reasoned_is_free(plain: Vocabulary, kind: str) -> None:
    outputs = plain.outputs("hermes", reasons=True)
    form = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer"}')
    answer = "5" if kind == "form" else GOOD
    use: dict[str, Any] = {
        "required": {"is_required": True},
        "strict": {"tools": (replace(WEATHER, is_strict=True),)},
        "form": {"tools": (), "form": form},
    }[kind]
    begun = spec_of(outputs, Section.REASONING, **use)
    still_open = spec_of(outputs, Section.OPEN, **use)
    spoken = spec_of(outputs, Section.CONTENT, **use)
    assert begun is not None
    assert begun.begins_after == "</think>"
    assert plain.accepts(begun, f"well < 5</think>{answer}")
    assert plain.accepts(still_open, f"<think>well < 5</think>\n\n{answer}")
    assert plain.accepts(still_open, answer)
    assert plain.accepts(spoken, answer)
    if kind != "strict":
        assert not plain.accepts(begun, "well < 5</think>Hello")
        assert not plain.accepts(still_open, "<think>well < 5</think>Hello")
        assert not plain.accepts(still_open, "Hello")
    if kind != "form":
        assert plain.accepts(begun, f"a</think>\n\n{answer}")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (GrammarSpec(kind=GrammarKind.JSON_OBJECT), '{"a": 1}'),
        (GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer"}'), "5"),
        (GrammarSpec(kind=GrammarKind.CHOICE, source='["yes", "n\\"o"]'), 'n"o'),
    ],
)
def test_an_answer_is_a_format_or_calls(plain: Vocabulary, form: GrammarSpec, text: str) -> None:
    spec = spec_of(plain.outputs("hermes"), form=form)
    assert plain.accepts(spec, text)
    assert plain.accepts(spec, f"{GOOD}\n{GOOD}")
    for other in ("Hello", BAD, f"{text}{GOOD}", ""):
        assert not plain.accepts(spec, other), other


@pytest.mark.parametrize("section", [Section.CONTENT, Section.OPEN])
def test_a_format_beside_others_is_read_like_one_alone(plain: Vocabulary, section: Section) -> None:
    outputs = plain.outputs("hermes", reasons=True)
    digit = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=r'{"type": "string", "pattern": "^\\d$"}')
    assert plain.accepts(spec_of(outputs, section, form=digit), '"7"')
    assert not plain.accepts(spec_of(outputs, section, form=digit), '"٢"')
    for source in ('{"const": 9007199254740993}', '{"fooBar": 1}'):
        form = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=source, field="response_format")
        with pytest.raises(APIError, match=r"response_format \(json_schema\) is refused: (const|unknown)"):
            spec_of(outputs, section, form=form)


TAG = {"structures": [{"begin": "<n>", "schema": {"const": 7}, "end": "</n>"}], "triggers": ["<n>"]}
OTHER_FORMS = [
    GrammarSpec(kind=GrammarKind.REGEX, source="yes|no"),
    GrammarSpec(kind=GrammarKind.EBNF, source='root ::= "yes" | "no"'),
    GrammarSpec(kind=GrammarKind.LARK, source='%llguidance {}\nstart: free | "no"\nfree: "yes"'),
    GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, source=json.dumps(TAG)),
]


@pytest.mark.parametrize("form", OTHER_FORMS, ids=lambda form: form.kind.value)
@pytest.mark.parametrize("marks", ["special", "added", "text"])
def test_a_model_that_may_reason_need_not(tmp_path: Path, form: GrammarSpec, marks: str) -> None:
    """A checkpoint counts as reasoning if its vocabulary has the marks, whether it reasons or not."""
    span = ("<think>", "</think>")
    vocabulary = Vocabulary(tmp_path, span if marks == "special" else (), span if marks == "added" else ())
    spec = spec_of(vocabulary.outputs("hermes", reasons=True), Section.OPEN, form, tools=())
    is_tag = form.kind is GrammarKind.STRUCTURAL_TAG
    for answer, is_allowed in (("yes", True), ("no", True), ("maybe", is_tag), ("<n>8</n>", False)):
        for before in ("", "<think>Well <\n</think>", "<think></think>"):
            assert vocabulary.accepts(spec, before + answer) is is_allowed, before + answer
    # To free text marks are text unless they are tokens.
    for whole in ("Well </think>yes", "<think>yes"):
        assert vocabulary.accepts(spec, whole) is (is_tag and marks == "text"), whole


def test_without_constraints_there_is_no_grammar(plain: Vocabulary) -> None:
    assert spec_of(plain.outputs("hermes")) is None
    assert spec_of(plain.outputs("hermes"), tools=()) is None
