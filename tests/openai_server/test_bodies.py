"""Bodies that a client would only send to do harm, or by mistake."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from naiad.openai_server.api.bodies import ChatBody, CompletionBody, parse_body
from naiad.openai_server.api.errors import APIError

ASKED: dict[str, Any] = {"model": "first", "prompt": "Hello"}


def refusal(raw: bytes) -> APIError:
    with pytest.raises(APIError) as caught:
        parse_body(raw, CompletionBody, is_lenient=False)
    assert caught.value.status == 400
    return caught.value


def refusal_of(**fields: Any) -> APIError:
    return refusal(msgspec.json.encode(ASKED | fields))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "first", "prompt": "\xff\xfe"}',
        b'{"model": "first", "prompt": "a", "\xff": 1}',
        b'{"model": "first", "prompt": "\\ud800"}',
        b'{"model": "first", "prompt": "a", "seed": 1e400}',
        b'{"model": "first", "prompt": "a", "min_p": NaN}',
        b'{"model": "first", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
)
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    assert refusal(raw).message.startswith("The body is not JSON")


def test_deep_values_are_refused_like_others() -> None:
    for depth in (1, 100, 900, 990):
        raw = b'{"model": "first", "prompt": "a", "tools": ' + b"[" * depth + b"1" + b"]" * depth + b"}"
        error = refusal(raw)
        assert error.param == "tools" or error.message.startswith("The body is not JSON")


@pytest.mark.parametrize("name", ["messages", "tools", "response_format", "chat_template_kwargs"])
def test_a_field_that_is_nested_too_deep_is_named(name: str) -> None:
    for levels in (128, 129, 900):
        deep: Any = {}
        for _ in range(levels - 2):
            deep = {"a": deep}
        value = [deep] if name in ("messages", "tools") else {"a": deep}
        raw = msgspec.json.encode({"model": "first", "messages": [], name: value})
        if levels == 128:
            parse_body(raw, ChatBody, is_lenient=False)
            continue
        with pytest.raises(APIError, match=f"{name} is nested too deep: expected at most 128") as caught:
            parse_body(raw, ChatBody, is_lenient=False)
        assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("seconds", [0, -1, -1e-9, 1e300])
def test_a_deadline_is_later_than_now(seconds: float) -> None:
    error = refusal_of(timeout_s=seconds)
    assert error.param == "timeout_s"
    assert error.message.startswith(f"timeout_s = {seconds!r}")


def test_an_id_that_every_chunk_repeats_is_short() -> None:
    parse_body(msgspec.json.encode(ASKED | {"request_id": "é" * 200}), CompletionBody, is_lenient=False)
    error = refusal_of(request_id="x" * 201)
    assert error.param == "request_id"
    assert len(error.message) < 200


def test_a_chat_may_have_what_routers_add_and_no_other_values_of_it() -> None:
    # As vllm-router 0.1.17 and sglang-router 0.3.2 write a chat.
    added = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
    }
    chat = {"model": "first", "messages": [{"role": "user", "content": "Hello"}]}
    parse_body(msgspec.json.encode(chat | added), ChatBody, is_lenient=False)
    for name in ("no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states"):
        with pytest.raises(APIError, match=f"{name} = .* is not supported"):
            parse_body(msgspec.json.encode(chat | {name: not added[name]}), ChatBody, is_lenient=False)


@pytest.mark.parametrize(
    ("value", "is_allowed"), [(1, True), (1.0, True), (0.0, True), (0.5, False), (True, False)]
)
def test_a_number_asks_for_nothing_however_it_is_written(value: float, is_allowed: bool) -> None:
    if is_allowed:
        raw = msgspec.json.encode(ASKED | {"length_penalty": value})
        assert parse_body(raw, CompletionBody, is_lenient=False)[1] == []
        return
    assert refusal_of(length_penalty=value).message == (
        f"length_penalty = {value!r} is not supported: expected no value or 1 or 0."
    )
