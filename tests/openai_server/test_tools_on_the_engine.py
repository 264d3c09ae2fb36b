"""Constrained chats on the default model, from the body to the answer, without a server between."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from helpers.scripted_model import TOOL_TEMPLATE
from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.frontend.chunks import ChunkTexts
from naiad.frontend.limits import ModelLimits
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server.api.bodies import ChatBody
from naiad.openai_server.api.parsing.families import CALL_FAMILIES, FamilyChoices
from naiad.openai_server.api.parsing.output_parser import grammar_of
from naiad.openai_server.api.reading import RequestReader
from naiad.openai_server.api.tally import Choice, Tally
from naiad.openai_server.engines.local_generation import LocalGeneration
from naiad.tokenization import Tokenizer

WINDOW = 2048
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "sky": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "What is the weather in Oslo in the next three days?"}]


@dataclass
class Desk:
    """The engine, and what reads requests for it."""

    engine: Engine
    tokenizer: Tokenizer

    def ask(self, family: str = "hermes", **fields: Any) -> list[Choice]:
        """Ask for a chat; return the choices, put together from the steps' deltas."""
        limits = ModelLimits(
            max_model_len=WINDOW, vocab_size=49_152, eos_token_ids=(2,), exclude_input_in_output=True
        )
        outputs = grammar_of(self.tokenizer, FamilyChoices(calls=family))
        reader = RequestReader(PromptEncoder(self.tokenizer, WINDOW, 49_152), limits, outputs)
        body = msgspec.convert({"model": "m", "messages": QUESTION, "max_tokens": 160, **fields}, ChatBody)
        asked = reader.chat(body, "id")
        return asyncio.run(self._run(asked))

    async def _run(self, asked: Any) -> list[Choice]:
        texts = ChunkTexts(self.tokenizer.table)
        generation = LocalGeneration(asked.request, 1, texts, lambda *_: None, asked.parsers())
        for request in asked.request.engine_requests(1):
            self.engine.add_request(request)
        while self.engine.has_work:
            for output in self.engine.step():
                generation.take(output)
        tally = Tally(asked.request)
        for delta in await generation.next():
            tally.keep(delta)
        assert tally.is_complete
        return tally.choices


@pytest.fixture(scope="module")
def desk(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(default_model_dir / name)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    config = EngineConfig(
        model_dir=str(default_model_dir), max_model_len=WINDOW, kv_cache_bytes=200 << 20, block_size=16
    )
    return Desk(build_engine(config), Tokenizer.from_directory(folder))


FORMS = [family.name for family in CALL_FAMILIES]


@pytest.mark.parametrize("family", FORMS)
def test_required_calls_are_valid(desk: Desk, family: str) -> None:
    for choice in desk.ask(family, tools=TOOLS, tool_choice="required", n=3, seed=5):
        assert choice.text == ""
        assert choice.calls
        assert choice.finish_reason in ("tool_calls", "length")
        calls = choice.calls if choice.finish_reason == "tool_calls" else choice.calls[:-1]
        for call in calls:
            parameters = PARAMETERS if call.name == "get_weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), parameters)


def test_a_named_function_is_called_once(desk: Desk) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for answer in desk.ask(tools=TOOLS, tool_choice=choice, n=3, seed=6):
        (call,) = answer.calls
        assert (call.name, answer.text, answer.finish_reason) == ("get_weather", "", "tool_calls")
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)


def test_a_format_is_obeyed(desk: Desk) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    for answer in desk.ask(response_format=form, n=3, seed=7):
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_an_answer_is_the_format_or_calls(desk: Desk) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    for answer in desk.ask(response_format=form, tools=TOOLS, n=3, seed=8):
        if answer.calls:
            assert answer.text == ""
        elif answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_free_text_stays_free_beside_strict_tools(desk: Desk) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    plain, strict = (
        desk.ask(
            messages=[{"role": "user", "content": "Say hello."}], tools=each, temperature=0, max_tokens=24
        )
        for each in (
            [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}],
            tools,
        )
    )
    assert [choice.text for choice in plain] == [choice.text for choice in strict]


def test_log_probs_of_a_call_are_not_those_of_content(desk: Desk) -> None:
    (answer,) = desk.ask(tools=TOOLS, tool_choice="required", logprobs=True, top_logprobs=1, temperature=0)
    assert answer.calls
    assert (answer.content_ids, answer.log_probs) == ([], [])
    assert answer.token_ids
