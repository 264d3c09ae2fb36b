"""Responses, Anthropic's messages and chats on a real server: one text for one request, in three forms."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers import messages_api
from helpers.messages_api import COUNT, MESSAGES, refused_message, streamed_message, whole_message
from helpers.openai_api import CHAT, COMPLETIONS, MODEL, connect, post, refused, streamed, whole
from helpers.reasoning_models import BEGIN, END, reasoning_checkpoint, reasoning_tokenizer
from helpers.responses_api import (
    RESPONSES,
    comparable,
    events_of,
    streamed_response,
    text_of,
    whole_response,
)
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import add_to_repository, create_repository

THINKER = "second"
HELLO = [{"role": "user", "content": "Hello"}]
NUM_RANDOM_REQUESTS = 40


@pytest.fixture(scope="module")
def api(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chat_apis")
    thinker = reasoning_checkpoint(folder / "checkpoint")
    create_repository(folder / "repository", tiny_dir, "--kv-cache-bytes", "64000000")
    add_to_repository(folder / "repository", thinker, THINKER, "--kv-cache-bytes", "64000000")
    with running(leaving, folder / "repository", "--openai-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0)


def drawn(draw: random.Random) -> dict[str, Any]:
    """Draw sampling settings that all three have."""
    asked: dict[str, Any] = {"seed": draw.randrange(2**63), "ignore_eos": True}
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0.5, 1.0, 1.7],
        "top_p": [0.3, 0.9, 1.0],
        "top_k": [1, 7],
        "min_p": [0.05],
        "presence_penalty": [0.7],
        "logit_bias": [{"17": 5.0, "300": -3}],
        "skip_special_tokens": [True, False],
    }
    for name, values in choices.items():
        if draw.random() < 0.4:
            asked[name] = draw.choice(values)
    return asked


def reasons_of(finish_reason: str | None, stop_reason: Any) -> tuple[str, str]:
    """The status of a response, and the reason why a message ended, for the reasons of a chat."""
    if finish_reason == "length":
        return "incomplete", "max_tokens"
    return "completed", "stop_sequence" if stop_reason else "end_turn"


def test_chats_responses_and_messages_have_the_same_text(api: Server) -> None:
    draw = random.Random(7)
    for number in range(NUM_RANDOM_REQUESTS):
        asked, size = drawn(draw), draw.randint(1, 24)
        stop = draw.choice([None, ["e"], ["a", "th", " "]])
        system, said = draw.choice([None, "Be brief."]), draw.choice(["Hello", "你好，世界", "😀👨‍👩‍👧‍👦"])
        turns = [{"role": "user", "content": said}]
        system_turn = [] if system is None else [{"role": "system", "content": system}]
        chat = whole(api, CHAT, messages=system_turn + turns, max_tokens=size, stop=stop, **asked)

        response = {"input": turns, "instructions": system, "max_output_tokens": size, "stop": stop, **asked}
        found = whole_response(api, **response)
        assert comparable(streamed_response(api, **response)) == comparable(found), (number, asked)

        sent = {"messages": turns, "max_tokens": size, "stop_sequences": stop, "system": system, **asked}
        message, other = whole_message(api, **sent), streamed_message(api, **sent)
        assert (message.content, message.stop_reason) == (other.content, other.stop_reason), (number, asked)

        status, reason = reasons_of(chat.reasons[0], chat.stop_reasons[0])
        assert text_of(found) == message.content[0].text == chat.texts[0], (number, asked)
        assert (found["status"], message.stop_reason) == (status, reason)
        assert message.stop_sequence == (chat.stop_reasons[0] if reason == "stop_sequence" else None)
        cached = [message.usage.input_tokens, message.usage.cache_read_input_tokens]
        assert found["usage"]["input_tokens"] == sum(cached) == chat.usage["prompt_tokens"]
        num_tokens = chat.usage["completion_tokens"]
        assert found["usage"]["output_tokens"] == message.usage.output_tokens == num_tokens


def test_a_response_says_what_it_was_asked(api: Server) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 3, "metadata": {"a": "b"}, "user": "me"}
    found = whole_response(api, input="Hello", instructions="Be brief.", store=True, ignore_eos=True, **asked)
    assert {name: found[name] for name in asked} == asked
    assert (found["instructions"], found["model"], found["store"]) == ("Be brief.", MODEL, False)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (found["error"], found["completed_at"]) == (None, None)
    assert found["id"].startswith("resp_")


def test_log_probs_of_a_response_are_those_of_the_chat(api: Server) -> None:
    asked = {"temperature": 0, "ignore_eos": True}
    chat = whole(api, CHAT, messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=2, **asked)
    sent = {"input": HELLO, "max_output_tokens": 6, "top_logprobs": 2, **asked}
    sent["include"] = ["message.output_text.logprobs"]
    for found in (whole_response(api, **sent), streamed_response(api, **sent)):
        tokens = found["output"][0]["content"][0]["logprobs"]
        assert [token["logprob"] for token in tokens] == pytest.approx(chat.log_probs[0], abs=1e-4)
        assert {len(token["top_logprobs"]) for token in tokens} == {2}


def test_what_was_said_can_be_sent_back(api: Server) -> None:
    asked = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 5}
    first = whole_response(api, input="Hello", **asked)
    again = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        *first["output"],
        {"role": "user", "content": "More"},
    ]
    turns = [*HELLO, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "More"}]
    expected = whole(api, CHAT, messages=turns, temperature=0, ignore_eos=True, max_tokens=5)
    assert text_of(whole_response(api, input=again, **asked)) == expected.texts[0]


REFUSED_RESPONSES: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": ({"model": "other"}, 404, "model"),
    "unknown field": ({"inputs": "a"}, 400, "inputs"),
    "no input": ({"input": None}, 400, "input"),
    "empty input": ({"input": []}, 400, "input"),
    "only reasoning": ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, 400, "input"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
    "file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input"),
    "audio": ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "input"),
    "tool call": ({"input": [{"type": "function_call_output", "output": ""}]}, 400, "input"),
    "unknown role": ({"input": [{"role": "tool", "content": "a"}]}, 400, "input"),
    "part without text": ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input"),
    "previous response": ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    "background": ({"background": True}, 400, "background"),
    "conversation": ({"conversation": "conv_1"}, 400, "conversation"),
    "prompt template": ({"prompt": {"id": "p"}}, 400, "prompt"),
    "tools": ({"tools": [{"type": "web_search"}]}, 400, "tools"),
    "format": ({"text": {"format": {"type": "xml"}}}, 400, "text"),
    "verbosity": ({"text": {"verbosity": "low"}}, 400, "text"),
    "effort": ({"reasoning": {"effort": "high"}}, 400, "reasoning"),
    "truncation": ({"truncation": "auto"}, 400, "truncation"),
    "include": ({"include": ["web_search_call.action.sources"]}, 400, "include"),
    "top_logprobs alone": ({"top_logprobs": 2}, 400, "top_logprobs"),
    "out of bounds": ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    "too long": ({"input": "a b c d " * 20_000}, 400, "input"),
    "metadata": ({"metadata": {"a": 1}}, 400, "metadata"),
}


@pytest.mark.parametrize("case", REFUSED_RESPONSES)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_responses_name_the_field(api: Server, case: str, stream: bool) -> None:
    fields, status, param = REFUSED_RESPONSES[case]
    found, error = refused(api, RESPONSES, {"model": MODEL, "input": "Hi", "stream": stream, **fields})
    assert (found, error["param"]) == (status, param), error
    assert param in error["message"] or status == 404 or error["code"] == "context_length_exceeded"


def test_options_that_change_nothing_are_accepted(api: Server) -> None:
    body = {"store": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "user": "u"}
    body |= {"truncation": "disabled", "background": False, "service_tier": "auto", "prompt_cache_key": "k"}
    body |= {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None}, "conversation": None}
    body |= {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False}}
    assert whole_response(api, input="Hi", max_output_tokens=1, **body)["status"] in (
        "completed",
        "incomplete",
    )


def test_the_official_client(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, "temperature": 0}
    answer = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    stop = answer.output_text[3:5]
    with client.responses.stream(extra_body={"stop": stop}, **asked) as stream:
        ended = stream.get_final_response()
    assert (ended.status, ended.output_text) == ("completed", answer.output_text.partition(stop)[0])
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="Hello")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(model=MODEL, input="Hello", previous_response_id="resp_1")
    assert wrong.value.param == "previous_response_id"


def test_the_official_client_with_many_at_once(api: Server) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=api.openai, api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                text = ""
                async for event in await client.responses.create(
                    model=MODEL,
                    input="Hello",
                    max_output_tokens=20,
                    stream=True,
                    extra_body={"seed": number % 4},
                ):
                    if event.type == "response.output_text.delta":
                        text += event.delta
                return text

            return await asyncio.gather(*map(one, range(16)))

    texts = asyncio.run(ask_all())
    assert texts == texts[:4] * 4


def test_messages_as_text_and_as_blocks(api: Server) -> None:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "Hel", **cached}, {"type": "text", "text": "lo"}]
    plain = whole_message(api, messages=HELLO, system="Be brief.", **greedy)
    sent = {"messages": [{"role": "user", "content": blocks}]}
    sent["system"] = [{"type": "text", "text": "Be ", **cached}, {"type": "text", "text": "brief."}]
    found = whole_message(api, **sent, metadata={"user_id": "me"}, **greedy)
    assert found.content == plain.content
    assert found.id.startswith("msg_")
    parts = [{"role": "user", "content": "Hel"}, {"role": "user", "content": "lo"}]
    one = [{"role": "user", "content": "Hel\n\nlo"}]
    assert (
        whole_message(api, messages=parts, **greedy).content
        == whole_message(api, messages=one, **greedy).content
    )


def test_a_message_that_was_begun_is_continued(api: Server) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The capital is"}]
    found = whole_message(api, messages=begun, temperature=0, ignore_eos=True, max_tokens=5)
    chat = {"messages": begun, "continue_final_message": True, "temperature": 0, "ignore_eos": True}
    assert found.content[0].text == whole(api, CHAT, max_tokens=5, **chat).texts[0]


def test_cached_tokens_are_counted_apart(api: Server) -> None:
    turns = [{"role": "user", "content": "Once upon a time " * 40}]
    first = whole_message(api, messages=turns, max_tokens=1).usage
    again = whole_message(api, messages=turns, max_tokens=1).usage
    streamed_again = streamed_message(api, messages=turns, max_tokens=1).usage
    assert first.cache_read_input_tokens == 0 < again.cache_read_input_tokens
    assert again == streamed_again
    assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens
    response = whole_response(api, input=turns, max_output_tokens=1)["usage"]
    assert response["input_tokens_details"]["cached_tokens"] == again.cache_read_input_tokens
    assert response["input_tokens"] == first.input_tokens


def test_tokens_are_counted_without_an_answer(api: Server) -> None:
    body = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "tools": []}
    status, _, raw = post(api, COUNT, body)
    message = whole_message(api, messages=HELLO, system="Be brief.", max_tokens=1)
    num_tokens = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert (status, json.loads(raw)) == (200, {"input_tokens": num_tokens})
    assert post(api, COUNT, {**body, "messages": [{"role": "user", "content": "a b " * 30_000}]})[0] == 200


REFUSED_MESSAGES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "unknown model": ({"model": "other"}, 404, "not_found_error", "other"),
    "unknown field": ({"max_token": 1}, 400, "invalid_request_error", "max_token"),
    "no size": ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    "nothing": ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    "stops": ({"stop_sequences": ["a"] * 65}, 400, "invalid_request_error", "stop_sequences"),
    "no messages": ({"messages": []}, 400, "invalid_request_error", "messages"),
    "tools": ({"tools": [{"name": "a"}]}, 400, "invalid_request_error", "tools"),
    "thinking": ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        400,
        "invalid_request_error",
        "messages[0].content[0].type = 'image'",
    ),
    "document": ({"system": [{"type": "document"}]}, 400, "invalid_request_error", "system[0].type"),
    "unknown role": ({"messages": [{"role": "tool", "content": ""}]}, 400, "invalid_request_error", "role"),
    "too long": (
        {"messages": [{"role": "user", "content": "a b c d " * 20_000}]},
        400,
        "invalid_request_error",
        "maximum context length",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MESSAGES)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_messages_name_the_field(api: Server, case: str, stream: bool) -> None:
    fields, status, kind, word = REFUSED_MESSAGES[case]
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "stream": stream, **fields}
    found, error = refused_message(api, body)
    assert (found, error.error.type) == (status, kind), error
    assert word in error.error.message


def test_every_failure_of_these_routes_has_their_form(api: Server) -> None:
    assert refused_message(api, b"{")[0] == 400
    assert refused_message(api, {}, Content_Type="text/plain")[0] == 415
    assert refused_message(api, {}, Host="rebound.example")[1].error.type == "permission_error"
    assert refused_message(api, {"model": "other", "messages": HELLO}, COUNT)[0] == 404
    assert refused_message(api, {}, "/v1/messages/batches")[0] == 404
    assert refused_message(api, {"model": MODEL, "messages": []}, COUNT)[0] == 400
    _, error = refused_message(api, {}, x_request_id="mine")
    assert error.request_id == "mine"


def thinking(draw: random.Random, tokens: dict[str, int]) -> dict[str, Any]:
    """Draw settings with which the model soon writes what ends its reasoning, and often what begins it."""
    biases = {str(tokens[END]): draw.choice([0.0, 6.0]), str(tokens[BEGIN]): draw.choice([0.0, 20.0])}
    return {
        "seed": draw.randrange(2**63),
        "ignore_eos": True,
        "logit_bias": {key: value for key, value in biases.items() if value},
        "presence_penalty": 30.0,
        "chat_template_kwargs": {"thinking": draw.choice(["open", "closed", "model decides"])},
    }


def expected_parts(raw: str, mode: str) -> tuple[str, str]:
    """The reasoning and the content of a text."""
    if mode != "open":
        if mode == "closed" or not raw.lstrip().startswith(BEGIN):
            return "", raw
        raw = raw.lstrip()[len(BEGIN) :]
    reasoning, _, content = raw.partition(END)
    return reasoning, content


def test_what_a_model_reasons_is_apart_from_what_it_says(api: Server) -> None:
    draw, tokenizer = random.Random(8), reasoning_tokenizer()
    tokens = {mark: tokenizer.token_to_id(mark) for mark in (BEGIN, END)}
    kinds = set()
    for number in range(NUM_RANDOM_REQUESTS):
        asked, size = thinking(draw, tokens) | {"model": THINKER}, draw.choice([3, 40])
        mode = asked["chat_template_kwargs"]["thinking"]
        stop = draw.choice([None, None, "e"])
        shown = {"messages": HELLO, "chat_template_kwargs": asked["chat_template_kwargs"], "model": THINKER}
        prompt = json.loads(post(api, "/tokenize", shown)[2])["tokens"]
        plain = {name: value for name, value in asked.items() if name != "chat_template_kwargs"}
        raw = whole(api, COMPLETIONS, prompt=prompt, max_tokens=size, stop=stop, **plain)
        reasoning, content = expected_parts(raw.texts[0], mode)
        kinds.add((mode, bool(reasoning), bool(content)))

        chat = {"messages": HELLO, "max_tokens": size, "stop": stop, "logprobs": True, **asked}
        found, pieces = whole(api, CHAT, **chat), streamed(api, CHAT, **chat)
        assert (found.reasonings, found.texts) == ([reasoning], [content]), (number, asked)
        assert (pieces.reasonings, pieces.texts) == ([reasoning], [content]), (number, asked)
        assert found.token_ids == pieces.token_ids == raw.token_ids
        assert len(found.log_probs[0]) == len(pieces.log_probs[0])
        num_reasoning = found.usage["completion_tokens_details"]["reasoning_tokens"]
        assert num_reasoning + len(found.log_probs[0]) == len(raw.token_ids[0])
        begins = mode != "closed" and raw.texts[0].lstrip().startswith(BEGIN)
        assert (num_reasoning > 0) == (mode == "open" or begins)

        response = {"input": HELLO, "max_output_tokens": size, "stop": stop, **asked}
        one, other = whole_response(api, **response), streamed_response(api, **response)
        assert comparable(one) == comparable(other)
        assert (text_of(one, "reasoning"), text_of(one)) == (reasoning, content)
        assert one["usage"]["output_tokens_details"]["reasoning_tokens"] == num_reasoning

        sent = {"messages": HELLO, "max_tokens": size, "stop_sequences": [stop] if stop else None, **asked}
        for message in (whole_message(api, **sent), streamed_message(api, **sent)):
            assert message.content[0].text == content
            assert message.usage.output_tokens_details.thinking_tokens == num_reasoning
    expected = {("open", True, False), ("open", True, True), ("model decides", True, True)}
    assert expected | {("closed", False, True), ("model decides", False, True)} <= kinds


def test_reasoning_is_left_out_where_it_is_not_wanted(api: Server, client: openai.OpenAI) -> None:
    open_ = {"chat_template_kwargs": {"thinking": "open"}}
    asked: dict[str, Any] = {"model": THINKER, "messages": HELLO, "max_tokens": 5, "temperature": 0}
    shown = client.chat.completions.create(**asked, extra_body=open_).choices[0].message.to_dict()
    assert shown["reasoning"] == shown["reasoning_content"] != ""
    hidden = client.chat.completions.create(**asked, extra_body={**open_, "include_reasoning": False})
    assert "reasoning" not in hidden.choices[0].message.to_dict()
    assert hidden.usage is not None
    assert hidden.usage.completion_tokens_details is not None
    assert hidden.usage.completion_tokens_details.reasoning_tokens == 5
    plain = client.chat.completions.create(**{**asked, "model": MODEL})
    assert "reasoning" not in plain.choices[0].message.to_dict()


def test_the_official_client_hears_what_a_model_reasons(client: openai.OpenAI) -> None:
    more = {"chat_template_kwargs": {"thinking": "open"}, "seed": 3, "ignore_eos": True}
    asked: dict[str, Any] = {"model": THINKER, "input": "Hello", "max_output_tokens": 9, "extra_body": more}
    (item,) = client.responses.create(**asked).output
    assert item.type == "reasoning"
    assert item.content is not None
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text != ""


def test_reasoning_is_continued_where_it_ended(api: Server) -> None:
    greedy = {"model": THINKER, "temperature": 0, "ignore_eos": True, "max_tokens": 4}
    for begun, parts in ((f"{BEGIN}So", 0), (f"{BEGIN}So{END} Well", 1), ("Well", 1)):
        messages = [*HELLO, {"role": "assistant", "content": begun}]
        found = whole(api, CHAT, messages=messages, continue_final_message=True, **greedy)
        assert [bool(found.reasonings[0]), bool(found.texts[0])] == [parts == 0, parts == 1], begun


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed(api: Server, path: str, stream: bool) -> None:
    connection = connect(api)
    body = {"model": MODEL, "stream": stream, "ignore_eos": True}
    body |= {"input": "Hello"} if path == RESPONSES else {"messages": HELLO, "max_tokens": 30_000}
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    eventually(lambda: num_running(api) == 1)
    connection.close()
    eventually(lambda: num_running(api) == 0)


def num_running(api: Server) -> float:
    """Number of requests of the model `first`."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(api.metric(name, model="llm") for name in names)


def test_a_killed_engine_ends_streams_in_their_own_words(api: Server) -> None:
    bodies = {
        RESPONSES: {"model": MODEL, "input": "Hello", "stream": True, "ignore_eos": True},
        MESSAGES: {
            "model": MODEL,
            "messages": HELLO,
            "max_tokens": 30_000,
            "stream": True,
            "ignore_eos": True,
        },
    }
    streams = {}
    for path, body in bodies.items():
        connection = connect(api)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        streams[path] = connection.getresponse()
        assert streams[path].readline().startswith(b"event: ")
    for engine in api.processes("naiad.engine_process"):
        engine.send_signal(signal.SIGKILL)
    response = events_of("event: response.created\n" + streams[RESPONSES].read().decode())
    error, failed = response[-2:]
    assert (error["type"], error["code"]) == ("error", "server_error")
    assert failed["type"] == "response.failed"
    assert "the engine process ended" in failed["response"]["error"]["message"] == error["message"]
    assert failed["response"]["output"][0]["status"] == "incomplete"
    rest = messages_api.message_events("event: message_start\n" + streams[MESSAGES].read().decode())
    assert isinstance(rest[-1], messages_api.Error)
    assert rest[-1].error.type == "api_error"
    status, headers, raw = post(api, MESSAGES, {**bodies[MESSAGES], "max_tokens": 1})
    assert (status, json.loads(raw)["error"]["type"]) == (529, "overloaded_error")
    assert headers["retry-after"] in ("1", "2", "3")
