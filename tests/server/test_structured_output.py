"""Structured output through the real server, at every model that takes text or ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from helpers.contract_models import MODELS, Model
from helpers.served import WAYS, ask_by, served
from helpers.server import Server, eventually

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "<|im_start|>user\nDescribe a person as JSON.<|im_end|>\n<|im_start|>assistant\n"
GUIDE = {
    "guided_decoding_guide_type": "json_schema",
    "guided_decoding_guide": json.dumps(SCHEMA),
    "max_tokens": 120,
    "return_finish_reason": True,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_followed(server: Server, way: str, temperature: float) -> None:
    answer = served(server, way, PROMPT, temperature=temperature, seed=5, **GUIDE)
    assert answer.end("finish_reason") == "stop"
    jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_ids_follow_a_schema_too(server: Server, default_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    answer = served(server, "grpc", prompt, **GUIDE)
    text = tokenizer.decode(answer.token_ids)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == served(server, "grpc", PROMPT, **GUIDE).text


@pytest.mark.parametrize(
    ("guide_type", "guide", "expected"),
    [
        ("regex", "ye[as]h?", "ye[as]h?$"),
        ("ebnf_grammar", 'root ::= "no" | "never"', "no|never"),
        ("json", None, r"\{.*\}?"),
    ],
)
def test_other_guides_are_followed(server: Server, guide_type: str, guide: str | None, expected: str) -> None:
    fields = {"guided_decoding_guide_type": guide_type} | ({"guided_decoding_guide": guide} if guide else {})
    text = served(server, "grpc", PROMPT, max_tokens=40, **fields).text
    pattern = {"type": "string", "pattern": f"^({expected})"}
    jsonschema.validate(text, pattern)


@pytest.mark.parametrize("way", WAYS)
def test_a_grammar_that_is_refused_names_its_field(server: Server, way: str) -> None:
    refused = GUIDE | {"guided_decoding_guide": '{"type": "array", "uniqueItems": true}'}
    answer = ask_by(server, way, PROMPT, **refused)
    assert "guided_decoding_guide (json_schema) is refused" in answer.error
    assert "uniqueItems" in answer.error
    eventually(lambda: server.used_blocks() == 0)


def test_a_grammar_that_allows_all_text_changes_nothing(server: Server) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(?s:.*)"}
    plain = served(server, "grpc", PROMPT, max_tokens=40)
    assert served(server, "grpc", PROMPT, max_tokens=40, **guide).text == plain.text


def test_the_prompt_goes_on_as_ever_beside_grammars(server: Server) -> None:
    plain = served(server, "grpc", PROMPT, max_tokens=20).text
    assert served(server, "grpc", PROMPT, **GUIDE | {"max_tokens": 20}).text != plain
    assert served(server, "grpc", PROMPT, max_tokens=20).text == plain


def text_models() -> list[Model]:
    return [model for model in MODELS if model.section in ("ensemble", "text", "vllm_model")]


@pytest.mark.parametrize("model", text_models(), ids=lambda model: model.name)
def test_every_model_that_takes_text_follows_a_grammar(presets: Server, model: Model) -> None:
    from helpers.raw_grpc import ask

    if model.section == "vllm_model":
        sampling = {"structured_outputs": {"choice": ["the fox"]}, "max_tokens": 40}
        fields: dict[str, Any] = {"sampling_parameters": json.dumps(sampling)}
    else:
        fields = {
            "guided_decoding_guide_type": "regex",
            "guided_decoding_guide": "the fox",
            "max_tokens": 40,
            "exclude_input_in_output": True,
        }
    outcome = ask(presets.grpc, model.name, model.tensors(model.base() | fields))
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    assert outcome.text.endswith("the fox")
