"""What an engine says of a grammar that it refuses names the field that the client has sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from helpers.call_vocabulary import Vocabulary, spec_of
from helpers.openai_api import CHAT, COMPLETIONS, refused
from helpers.scripted_model import Scripted, scripted_model
from naiad.errors import InvalidRequestError
from naiad.grammar.source import to_llguidance
from naiad.openai_server.api.constraints.grammar_errors import about_field
from naiad.openai_server.api.tools import Tool
from naiad.sequence import GrammarKind, GrammarSpec

RESPONSES = "/v1/responses"
CHATS = {"messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TEXT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
REASON = "Pointer '/$defs/a' does not exist"
COMPILING = f"failed to compile JSON schema: {REASON}"
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {**CHATS, "response_format": FORMAT}, "response_format", " (json_schema)"),
    (COMPLETIONS, {"prompt": "Hi", "response_format": FORMAT}, "response_format", " (json_schema)"),
    (RESPONSES, {"input": "Hi", "text": TEXT}, "text.format", " (json_schema)"),
    (CHAT, {**CHATS, "structured_outputs": {"regex": "(a"}}, "structured_outputs", ".regex (regex)"),
    (CHAT, {**CHATS, "tools": TOOLS, "tool_choice": "required"}, "tools", ""),
    (RESPONSES, {"input": "Hi", "text": TEXT, "tools": [{"type": "function", "name": "f"}]},
     "text.format", " with tools"),
]  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted_model(tmp_path_factory.mktemp("refusals")) as script:
        yield script


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What llguidance says of calls of a tool with `SCHEMA`, and where."""
    vocabulary = Vocabulary(tmp_path_factory.mktemp("vocabulary"))
    spec = spec_of(vocabulary.outputs("hermes"), tools=(Tool("f", "", SCHEMA),), is_required=True)
    assert spec is not None
    error: str = LLMatcher(vocabulary.llguidance, to_llguidance(spec, {}), log_level=0).get_error()
    assert REASON in error
    assert "start: " in error, "else nothing would have to be left out"
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param", "rest"), CASES, ids=[f"{case[0]} {case[2]}{case[3]}" for case in CASES]
)
def test_a_refused_grammar_names_its_field(
    api: Any, problem: str, path: str, fields: dict[str, Any], param: str, rest: str, stream: bool
) -> None:
    api.problem = problem
    status, error = refused(api, path, {"model": "first", "stream": stream, **fields})
    assert (status, error["param"]) == (400, param)
    assert error["message"] == f"{param}{rest} is refused: {COMPILING}"


def test_a_remote_engine_calls_the_field_otherwise() -> None:
    spec = GrammarSpec(kind=GrammarKind.CHOICE, field="structured_outputs.choice")
    sent = InvalidRequestError("guided_decoding_guide (regex) is refused: it is too large")
    error = about_field(sent, spec, "guided_decoding_guide")
    assert str(error) == "structured_outputs.choice (regex) is refused: it is too large"
    assert getattr(error, "field_name", None) == "structured_outputs"


def test_other_errors_stay_as_they_are() -> None:
    error = InvalidRequestError("toolsmith = 3: expected 4")
    assert about_field(error, None) is error
    assert about_field(error, GrammarSpec(kind=GrammarKind.LARK, field="tools")) is error
