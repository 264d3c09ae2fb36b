"""The OpenAI API on a real server: the same texts as the `text` model, and the official client's words."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.openai_api import (
    CHAT,
    COMPLETIONS,
    MODEL,
    address,
    connect,
    post,
    refused,
    streamed,
    whole,
)
from helpers.openai_requests import comparable, drawn_body, text_fields
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {"max_tokens": 30_000, "ignore_eos": True}
NUM_RANDOM_REQUESTS = 25
# The sampling of OpenAI without a seed is random.
SEED = 11


@pytest.fixture(scope="module")
def api(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("openai") / "repository"
    create_repository(repository, tiny_dir, "--kv-cache-bytes", "64000000")
    with running(leaving, repository, "--openai-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(api: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0)


def asked_of_text(server: Server, fields: dict[str, Any]) -> list[str]:
    """The texts of the `text` model for these fields."""
    status, text = server.post("/v2/models/text/generate_stream", {"stream": True, **fields})
    assert status == 200, text
    texts = [""] * fields.get("num_return_sequences", 1)
    for line in text.splitlines():
        if line:
            event = json.loads(line.removeprefix("data: "))
            texts[event.get("sequence_index", 0)] += event["text_output"]
    return texts


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_answers_in_one_piece_and_the_text_model_agree(api: Server, path: str) -> None:
    """A sample of what `test_random_requests.py` compares without a Triton server."""
    num_of_text = 0
    for number in range(NUM_RANDOM_REQUESTS):
        asked = drawn_body(random.Random(f"server {number}"), path)
        print(number, asked)
        found, expected = streamed(api, path, **asked), whole(api, path, **asked)
        assert comparable(found) == comparable(expected)
        for values, others in zip(found.log_probs, expected.log_probs, strict=True):
            assert values == pytest.approx(others, abs=1e-4)
        if (fields := text_fields(asked)) is not None:
            num_echoed = len(asked["prompt"]) if asked.get("echo") else 0
            assert [text[num_echoed:] for text in found.texts] == asked_of_text(api, fields)
            num_of_text += 1
    assert num_of_text >= NUM_RANDOM_REQUESTS / 4


def test_a_chat_is_the_rendered_prompt(api: Server, client: openai.OpenAI) -> None:
    status, _, raw = post(api, "/tokenize", {"messages": MESSAGES})
    tokens = json.loads(raw)["tokens"]
    assert status == 200
    by_ids = whole(api, COMPLETIONS, prompt=tokens, max_tokens=16, temperature=0)
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
    assert chat.choices[0].message.content == by_ids.texts[0]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(tokens)


def test_a_message_can_be_continued(api: Server) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital is"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    _, _, raw = post(api, "/tokenize", body)
    _, _, text = post(api, "/detokenize", {"tokens": json.loads(raw)["tokens"]})
    assert json.loads(text)["prompt"].endswith("The capital is")
    assert whole(api, CHAT, max_tokens=4, ignore_eos=True, **body).reasons == ["length"]


def test_prompts_as_text_ids_and_lists_of_both(api: Server) -> None:
    status, _, raw = post(api, "/tokenize", {"prompt": ""})
    assert (status, json.loads(raw)["error"]["param"]) == (400, "prompt")
    _, _, raw = post(api, "/tokenize", {"prompt": "Hello world"})
    ids = json.loads(raw)["tokens"]
    greedy = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    alone = whole(api, COMPLETIONS, prompt="Hello world", **greedy).texts[0]
    assert whole(api, COMPLETIONS, prompt=ids, **greedy).texts == [alone]
    mixed = ["Hello world", ids, "Other"]
    assert whole(api, COMPLETIONS, prompt=mixed, n=2, **greedy).texts[:4] == [alone] * 4
    assert streamed(api, COMPLETIONS, prompt=mixed, n=2, **greedy).texts[:4] == [alone] * 4


def test_an_echoed_prompt_comes_first(api: Server) -> None:
    asked = {"prompt": ["  Hello", "World "], "max_tokens": 3, "echo": True, "seed": SEED, "n": 2}
    found = whole(api, COMPLETIONS, **asked)
    plain = whole(api, COMPLETIONS, **{**asked, "echo": False})
    echoes = ["  Hello", "  Hello", "World ", "World "]
    assert found.texts == [echo + text for echo, text in zip(echoes, plain.texts, strict=True)]
    assert streamed(api, COMPLETIONS, **asked).texts == found.texts
    nothing = whole(api, COMPLETIONS, prompt="Hello", max_tokens=0, echo=True)
    assert (nothing.texts, nothing.token_ids, nothing.usage["completion_tokens"]) == (["Hello"], [[]], 0)


def test_the_last_tokens_of_a_prompt_are_kept(api: Server) -> None:
    _, _, raw = post(api, "/tokenize", {"prompt": "one two three four"})
    ids = json.loads(raw)["tokens"]
    greedy = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    cut = whole(api, COMPLETIONS, prompt="one two three four", truncate_prompt_tokens=2, **greedy)
    assert cut.texts == whole(api, COMPLETIONS, prompt=ids[-2:], **greedy).texts
    assert cut.usage["prompt_tokens"] == 2
    first = whole(
        *(api, COMPLETIONS), prompt=ids, truncate_prompt_tokens=2, truncation_side="right", **greedy
    )
    assert first.texts == whole(api, COMPLETIONS, prompt=ids[:2], **greedy).texts


def test_stop_reasons(api: Server) -> None:
    text = whole(api, COMPLETIONS, prompt="Hello", max_tokens=20, ignore_eos=True, temperature=0)
    stop = text.texts[0][4:6]
    assert whole(
        api, COMPLETIONS, prompt="Hello", max_tokens=20, ignore_eos=True, temperature=0, stop=stop
    ).stop_reasons == [stop]
    token_id = text.token_ids[0][5]
    found = whole(api, COMPLETIONS, prompt="Hello", max_tokens=20, temperature=0, stop_token_ids=[token_id])
    assert (found.reasons, found.stop_reasons) == (["stop"], [token_id])
    timed = whole(api, COMPLETIONS, prompt="Hello", timeout_s=0.2, **ENDLESS)
    assert (timed.reasons, timed.stop_reasons) == (["length"], ["timeout"])


REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": ({"model": "other"}, 404, "model"),
    "unknown field": ({"temprature": 1}, 400, "temprature"),
    "wrong type": ({"temperature": "hot"}, 400, "temperature"),
    "boolean for a number": ({"max_tokens": True}, 400, "max_tokens"),
    "text for a whole number": ({"max_tokens": "10"}, 400, "max_tokens"),
    "fraction for a whole number": ({"max_tokens": 1.5}, 400, "max_tokens"),
    "out of bounds": ({"temperature": -1}, 400, "temperature"),
    "too many choices": ({"n": 17}, 400, "n"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools"),
    "response format": ({"response_format": {"type": "xml"}}, 400, "response_format"),
    "own template": ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    "template variable": ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    "large template variables": ({"chat_template_kwargs": {"a": "a" * 20_000}}, 400, "chat_template_kwargs"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    "no messages": ({"messages": []}, 400, "messages"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, 400, "messages"),
    "id beyond the vocabulary": ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "odd id": ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    "top_logprobs alone": ({"top_logprobs": 2}, 400, "top_logprobs"),
    "usage without a stream": ({"stream": False, "stream_options": {}}, 400, "stream_options"),
    "unknown side": (
        {"truncate_prompt_tokens": 2, "truncation_side": "middle"},
        400,
        "truncation_side",
    ),
    "too many top_logprobs": ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    "stored": ({"store": True}, 400, "store"),
    "prompt too long": ({"messages": [{"role": "user", "content": "a b c d " * 20_000}]}, 400, "messages"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(api: Server, case: str, stream: bool) -> None:
    fields, status, param = REFUSALS[case]
    found, error = refused(api, CHAT, {"model": MODEL, "messages": MESSAGES, "stream": stream, **fields})
    assert (found, error["param"]) == (status, param), error
    assert param in error["message"] or status == 404 or error["code"] == "context_length_exceeded"


def test_all_odd_ids_of_biases_are_named(api: Server) -> None:
    biases = {"first": 1, "5": 1, "second": 2, **{f"x{number}": 1 for number in range(100)}}
    _, error = refused(api, CHAT, {"model": MODEL, "messages": MESSAGES, "logit_bias": biases})
    assert "'first', 'second'" in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_each_chunk_says_the_usage_so_far_if_asked_for(api: Server, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello", "echo": True}
    status, _, raw = post(api, path, body)
    assert status == 200, raw
    chunks = [json.loads(line[6:]) for line in raw.decode().split("\n\n")[:-2]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5)
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


@pytest.mark.parametrize(("n", "best_of"), [(None, 2), (2, 1), (2, 3)])
def test_more_candidates_than_choices_are_refused(api: Server, n: int | None, best_of: int) -> None:
    body = {"model": MODEL, "prompt": "Hello", "n": n, "best_of": best_of}
    status, error = refused(api, COMPLETIONS, body)
    assert (status, error["param"]) == (400, "best_of"), error


def test_as_many_candidates_as_choices_are_the_choices(api: Server) -> None:
    asked = {"prompt": "Hello", "n": 2, "seed": SEED, "max_tokens": 4}
    assert whole(api, COMPLETIONS, best_of=2, **asked).texts == whole(api, COMPLETIONS, **asked).texts


def test_no_best_token_leaves_the_token_itself(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=3, logprobs=0, seed=SEED)
    log_probs = answer.choices[0].logprobs
    assert log_probs is not None
    assert log_probs.tokens is not None
    assert log_probs.token_logprobs is not None
    assert log_probs.top_logprobs == [
        {token: value} for token, value in zip(log_probs.tokens, log_probs.token_logprobs, strict=True)
    ]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_objects(api: Server, raw: bytes) -> None:
    assert refused(api, CHAT, raw)[0] == 400


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", 5], [5, "a"], [10**9], [-1], 5, {"a": 1}])
def test_prompts_that_are_none(api: Server, prompt: Any) -> None:
    status, error = refused(api, COMPLETIONS, {"model": MODEL, "prompt": prompt})
    assert (status, error["param"]) == (400, "prompt"), error


def test_fields_that_change_nothing_are_accepted(api: Server) -> None:
    body = {"store": False, "user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "tools": None}
    body |= {"modalities": ["text"], "response_format": {"type": "text"}, "tool_choice": "none"}
    assert whole(api, CHAT, messages=MESSAGES, max_tokens=2, ignore_eos=True, **body).reasons == ["length"]


def test_routes_and_methods(api: Server) -> None:
    assert post(api, "/v1/models", b"", "GET")[0] == 200
    assert post(api, f"/v1/models/{MODEL}", b"", "GET")[0] == 200
    assert refused(api, "/v1/nothing", {})[0] == 404
    assert post(api, "/v1/models/other", b"", "GET")[0] == 404
    assert post(api, CHAT, b"", "GET")[0] == 405
    assert post(api, "/health", b"", "GET")[0] == 200
    assert post(api, "/health/ready", b"", "GET")[0] == 200


def test_pages_of_other_sites_are_refused(api: Server) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    assert refused(api, CHAT, body, Content_Type="text/plain")[0] == 415
    assert refused(api, CHAT, body, Host="rebound.example")[0] == 403
    _, headers, _ = post(api, CHAT, body, Origin="https://other.example")
    assert "access-control-allow-origin" not in headers
    status, headers, _ = post(api, CHAT, b"", "OPTIONS", Origin="https://other.example")
    assert status == 405
    assert "access-control-allow-origin" not in headers


def test_request_ids_are_echoed(api: Server) -> None:
    assert post(api, "/v1/models", b"", "GET", x_request_id="abc")[1]["x-request-id"] == "abc"
    assert post(api, "/v1/models", b"", "GET")[1]["x-request-id"].startswith("req_")


def test_the_official_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert raw.parse().id.startswith("chatcmpl-")
    # Drawn, a text may be empty; then its content is never done.
    asked = client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0)
    with asked as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "content.done"
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="Hello", stream=True, seed=SEED)
    )
    assert text == client.completions.create(model=MODEL, prompt="Hello", seed=SEED).choices[0].text
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-2)
    assert wrong.value.param == "temperature"


def test_the_official_client_with_many_at_once(api: Server) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=api.openai, api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                text = ""
                async for chunk in await client.completions.create(
                    model=MODEL, prompt="Hello", max_tokens=20, seed=number % 4, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*map(one, range(32)))

    texts = asyncio.run(ask_all())
    assert texts == texts[:4] * 8


def num_running(api: Server) -> float:
    return api.metric("vllm:num_requests_running") + api.metric("vllm:num_requests_waiting")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed(api: Server, stream: bool) -> None:
    connection = connect(api)
    body = {"model": MODEL, "prompt": "Hello", "stream": stream, "n": 2, **ENDLESS}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    eventually(lambda: num_running(api) == 2)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: num_running(api) == 0)
    eventually(lambda: api.used_blocks() == 0)


def test_a_hundred_reloads_leave_nothing(api: Server) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True, **ENDLESS}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, _, port = address(api).rpartition(":")
    for number in range(100):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if number % 2:
                connection.recv(100)
    eventually(lambda: num_running(api) == 0)
    eventually(lambda: api.used_blocks() == 0)
    assert whole(api, CHAT, messages=MESSAGES, max_tokens=2, ignore_eos=True).reasons == ["length"]
