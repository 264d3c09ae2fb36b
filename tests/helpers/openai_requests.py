"""Random requests of the OpenAI API, the same for `text`, and what has to be equal in their answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.openai_api import CHAT, Said
from naiad.frontend.field import Field, Frontend, Kind
from naiad.frontend.fields import FIELD, fields_at
from naiad.openai_server.api.bodies import ChatBody, CompletionBody

PROMPTS = ("Hello", "The quick brown fox", "你好，世界", "Emoji 😀👨‍👩‍👧‍👦 are", "  two spaces")
STRINGS = ("e", "a", "th", " ", "qu", "。", "stop")
BODIES = {CHAT: ChatBody}
# Bounds of numbers, where those of the table would leave little to compare.
_BOUNDS = {
    "max_tokens": (1, 24),
    "min_tokens": (0, 2),
    "temperature": (0, 2),
    "top_k": (0, 40),
    "min_p": (0, 0.125),
    "top_n_sigma": (0, 4),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.75, 1.5),
    "num_draft_tokens": (0, 4),
    "num_return_sequences": (1, 3),
    "num_prompt_log_probs": (0, 3),
}
# Bounds of any other number.
_MOST = 8
# Fields of which most values leave little to compare are in few requests, others in most.
_SHARES = {"ignore_eos": 0.7, "seed": 1.0, "max_tokens": 1.0, "allowed_token_ids": 0.1}
_SHARE = 0.3
# Fractions that a float32 holds exactly.
_FRACTION = 16
# The ids of the tiny checkpoint's tokenizer that are no special tokens.
_IDS = (5, 390)
NO_DEADLINE_S = 600

_Draw = Callable[[random.Random], Any]
# Fields of the bodies that are not in the table of fields, and are sent together.
_OF_BOTH: dict[str, _Draw] = {
    "add_special_tokens": lambda draw: {"add_special_tokens": draw.random() < 0.5},
    "skip_special_tokens": lambda draw: {"skip_special_tokens": draw.random() < 0.5},
    "spaces": lambda _: {"spaces_between_special_tokens": True},
    "truncation": lambda draw: {
        "truncate_prompt_tokens": draw.choice((-1, 2, 3)),
        "truncation_side": draw.choice(("left", "right")),
    },
    "timeout_s": lambda _: {"timeout_s": NO_DEADLINE_S},
    "request_id": lambda draw: {"request_id": f"request {draw.random()}"},
    "names of tokens": lambda _: {"return_tokens_as_token_ids": True},
    "structured_outputs": lambda _: {"structured_outputs": {"regex": "[a-z ]{1,40}"}},
    "response_format": lambda _: {"response_format": {"type": "json_object"}},
}
_OF_COMPLETIONS: dict[str, _Draw] = {
    "echo": lambda _: {"echo": True},
    "logprobs": lambda draw: {"logprobs": draw.randrange(4)},
    "best_of": lambda _: {"n": 2, "best_of": 2},
}
_OF_CHATS: dict[str, _Draw] = {
    "logprobs": lambda draw: {"logprobs": True, "top_logprobs": draw.randrange(4)},
    "max_completion_tokens": lambda draw: {"max_completion_tokens": draw.randrange(3, 25)},
    "continued": lambda _: {"continue_final_message": True, "add_generation_prompt": False},
    "chat_template_kwargs": lambda _: {"chat_template_kwargs": {"mood": "merry"}},
    "include_reasoning": lambda draw: {"include_reasoning": draw.random() < 0.5},
}
# Fields that are in every request, or that tests of tools draw.
NOT_DRAWN = {"model", "stream", "stream_options", "prompt", "messages", "return_token_ids"} | {
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
# Fields that the `text` model has no field for, although its answer would be another.
_NOT_OF_TEXT = {
    *("add_special_tokens", "skip_special_tokens", "truncate_prompt_tokens", "response_format"),
    "continue_final_message",
}


def drawn(draw: random.Random) -> dict[str, Any]:
    """Draw the fields of the table; each of them is in some requests."""
    asked: dict[str, Any] = {}
    for key, field in fields_at(Frontend.OPENAI).items():
        if draw.random() < _SHARES.get(field.name, _SHARE):
            asked[key] = _value(draw, field)
    if draw.random() < _SHARE:
        asked |= _OF_BOTH["skip_special_tokens"](draw)
    asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
    if asked["seed"] in FIELD["seed"].key_off:
        # Without a seed two answers are equal only if nothing is drawn.
        asked["temperature"] = 0
    return asked


def drawn_body(draw: random.Random, path: str) -> dict[str, Any]:
    """Draw a body; each field is in some of them."""
    asked = drawn(draw)
    for makes in (_OF_BOTH, _OF_CHATS if path == CHAT else _OF_COMPLETIONS):
        for make in makes.values():
            if draw.random() < _SHARE / 3:
                asked |= make(draw)
    prompt = draw.choice(PROMPTS)
    if "structured_outputs" in asked or "response_format" in asked:
        # A grammar leaves few tokens, of which the allowed ones may be none.
        asked.pop("allowed_token_ids", None)
        asked.pop("bad_words", None)
    if {"structured_outputs", "response_format"} <= asked.keys():
        del asked["response_format"]
    if path != CHAT:
        return asked | {"prompt": prompt}
    messages = [{"role": "user", "content": prompt}]
    if asked.get("continue_final_message"):
        messages.append({"role": "assistant", "content": "Well,"})
    return asked | {"messages": messages}


def fields_of(path: str) -> set[str]:
    """The fields that requests may have there, without those that are not drawn."""
    return set(BODIES.get(path, CompletionBody).__struct_fields__) - NOT_DRAWN


def text_fields(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of `text` that ask for the same, as JSON; None if it has none."""
    if any(asked.get(name) not in (None, name == "skip_special_tokens") for name in _NOT_OF_TEXT):
        return None
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "exclude_input_in_output": True}
    for key, field in fields_at(Frontend.OPENAI).items():
        value = asked.get(key)
        if value is None or value in field.key_off or not field.name_at(Frontend.TEXT):
            continue
        if key == "logit_bias":
            fields |= {"logit_bias_ids": [int(each) for each in value]}
            fields |= {"logit_bias_values": list(value.values())}
        else:
            fields[field.name] = [value] if isinstance(value, str) and not field.is_scalar else value
    if "max_completion_tokens" in asked:
        fields["max_tokens"] = asked["max_completion_tokens"]
    if "structured_outputs" in asked:
        ((kind, guide),) = asked["structured_outputs"].items()
        fields |= {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    if "prompt" in asked:
        return fields | {"text_input": asked["prompt"]}
    return fields | {"messages": json.dumps(asked["messages"])}


def tensors_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of `text` as tensors with one row."""
    kinds = {Kind.STRING: np.object_, Kind.BOOL: np.bool_, Kind.FP32: np.float32, Kind.UINT64: np.uint64}
    tensors = {}
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        values = [each.encode() if isinstance(each, str) else each for each in values]
        tensors[name] = np.array([values], dtype=kinds.get(FIELD[name].kind, np.int32))
    return tensors


def comparable(said: Said) -> tuple[Any, ...]:
    usage = {name: said.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return said.texts, said.reasons, said.stop_reasons, said.token_ids, usage


def _value(draw: random.Random, field: Field) -> Any:
    if field.key_off and draw.random() < 0.1:
        return draw.choice(field.key_off)
    if field.name == "logit_bias_ids":
        return {str(draw.randrange(*_IDS)): draw.randrange(-80, 81) / _FRACTION for _ in range(4)}
    if field.kind is Kind.BOOL:
        return draw.random() < 0.5
    if field.kind is Kind.STRING:
        return f"tenant {draw.randrange(3)}" if field.is_scalar else draw.sample(STRINGS, draw.choice((1, 2)))
    if not field.is_scalar:
        # Few ids of a list without a bound would allow too little.
        return [draw.randrange(*_IDS) for _ in range(20 if field.max_items else 200)]
    if field.kind is Kind.UINT64:
        return draw.getrandbits(63)
    return _number(draw, field)


def _number(draw: random.Random, field: Field) -> float:
    low, high = _BOUNDS.get(field.name, (-_MOST, _MOST))
    low, high = max(low, field.minimum), min(high, field.maximum)
    above = field.key_above if field.key_above is not None else field.above
    if field.kind is not Kind.FP32:
        return draw.randint(math.ceil(low), math.floor(high))
    first = math.ceil(low * _FRACTION) if above is None else math.floor(max(low, above) * _FRACTION) + 1
    return draw.randint(first, math.floor(high * _FRACTION)) / _FRACTION
