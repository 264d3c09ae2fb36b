"""`naiad openai` in front of a real server: what it serves is what the server's own OpenAI API serves."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.messages_api import whole_message
from helpers.openai_api import CHAT, COMPLETIONS, connect, post, refused, streamed, whole
from helpers.openai_requests import comparable, drawn
from helpers.remote_door import running_door
from helpers.responses_api import text_of, whole_response
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository
from naiad.openai_server.access.key_file import digest_of
from naiad.openai_server.api.refusals import remote_refusals

MODELS = ("ensemble", "text")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS = {"max_tokens": 30_000, "ignore_eos": True}
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPTS = ("Hello", "The quick brown fox", "你好，世界", "Emoji 😀👨‍👩‍👧‍👦 are", "<s>begins with a token")
NUM_RANDOM_REQUESTS = 60
REFUSED = {refusal.name for refusal in remote_refusals()}


@pytest.fixture(scope="module")
def api(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    """A server with an OpenAI API of its own, whose model is `first`."""
    repository = tmp_path_factory.mktemp("remote") / "repository"
    create_repository(repository, tiny_dir, "--kv-cache-bytes", "64000000")
    with running(leaving, repository, "--openai-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def door(api: Server, tiny_dir: Path) -> Iterator[Server]:
    """The API in front of it, whose models are `ensemble` and `text`."""
    with running_door(api.grpc, tiny_dir, "--metrics-url", f"http://{api.metrics}/metrics") as remote:
        eventually(lambda: names_of(remote) == sorted(MODELS))
        yield remote


def names_of(server: Server) -> list[str]:
    _, _, raw = post(server, "/v1/models", b"", "GET")
    return sorted(model["id"] for model in json.loads(raw)["data"])


def remotely(fields: dict[str, Any], model: str) -> dict[str, Any]:
    """The same request for the remote door, without what it refuses."""
    return {**fields, "model": model, "return_token_ids": False}


def without_ids(said: tuple[Any, ...]) -> tuple[Any, ...]:
    texts, reasons, stop_reasons, _ids, usage = said
    return texts, reasons, stop_reasons, usage


def agree(api: Server, door: Server, path: str, fields: dict[str, Any], model: str) -> None:
    """Whole, streamed and the local door's answer are the same."""
    fields = {name: value for name, value in fields.items() if name not in REFUSED}
    expected = without_ids(comparable(whole(api, path, **fields)))
    sent = remotely(fields, model)
    assert without_ids(comparable(whole(door, path, **sent))) == expected, sent
    assert without_ids(comparable(streamed(door, path, **sent))) == expected, sent


def test_completions_agree_streamed_and_whole_with_the_local_door(api: Server, door: Server) -> None:
    draw = random.Random(15)
    for number in range(NUM_RANDOM_REQUESTS):
        fields = {"prompt": draw.choice(PROMPTS), **drawn(draw)}
        agree(api, door, COMPLETIONS, fields, MODELS[number % 2])


def test_chats_agree_streamed_and_whole_with_the_local_door(api: Server, door: Server) -> None:
    draw = random.Random(16)
    for number in range(NUM_RANDOM_REQUESTS // 3):
        agree(api, door, CHAT, {"messages": MESSAGES, **drawn(draw)}, MODELS[number % 2])


@pytest.mark.parametrize("model", MODELS)
def test_prompts_that_only_ids_say(api: Server, door: Server, model: str) -> None:
    _, _, raw = post(api, "/tokenize", {"prompt": "Hello world"})
    ids = json.loads(raw)["tokens"]
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital is"}]
    for path, fields in (
        (COMPLETIONS, {"prompt": ids}),
        (COMPLETIONS, {"prompt": ["Hello world", ids, "Other"], "n": 2, "seed": 3}),
        (COMPLETIONS, {"prompt": "one two three four", "truncate_prompt_tokens": 2}),
        (COMPLETIONS, {"prompt": ["  Hello", "World "], "echo": True}),
        (COMPLETIONS, {"prompt": "Hello", "echo": True, "max_tokens": 0}),
        (COMPLETIONS, {"prompt": "Hello", "add_special_tokens": False}),
        (CHAT, {"messages": begun, "continue_final_message": True}),
        (CHAT, {"messages": MESSAGES, "add_generation_prompt": False}),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}}),
        (CHAT, {"messages": [{"role": "user", "content": "<|im_end|> is plain here"}]}),
    ):
        agree(api, door, path, {**GREEDY, **fields}, model)


def test_prompts_that_no_text_says_are_refused(api: Server, door: Server) -> None:
    _, _, raw = post(api, "/tokenize", {"prompt": "the"})
    assert len(json.loads(raw)["tokens"]) < 3
    letters = [json.loads(post(api, "/tokenize", {"prompt": each})[2])["tokens"][0] for each in "the"]
    status, error = refused(door, COMPLETIONS, {"model": "text", "prompt": letters})
    assert (status, error["param"], error["code"]) == (400, "prompt", "unsupported_value")


ASKS = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "top_logprobs": {"top_logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True},
    "skip_special_tokens": {"skip_special_tokens": False},
}


@pytest.mark.parametrize("refusal", remote_refusals(), ids=lambda refusal: refusal.name)
@pytest.mark.parametrize("stream", [False, True])
def test_what_needs_token_ids_is_refused_by_name(door: Server, refusal: Any, stream: bool) -> None:
    body = {"model": "text", "messages": MESSAGES, "stream": stream, **ASKS[refusal.name]}
    status, error = refused(door, CHAT, body)
    assert (status, error["param"], error["code"]) == (400, refusal.name, "unsupported_value")
    assert refusal.reason in error["message"]


@pytest.mark.parametrize("num_best", [0, 3])
def test_log_probabilities_of_completions_are_refused(door: Server, num_best: int) -> None:
    body = {"model": "text", "prompt": "Hello", "logprobs": num_best, "echo": True}
    assert refused(door, COMPLETIONS, body)[1]["param"] == "logprobs"


REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": ({"model": "llm"}, 404, "model"),
    "unknown field": ({"temprature": 1}, 400, "temprature"),
    "out of bounds": ({"temperature": -1}, 400, "temperature"),
    "too many choices": ({"n": 17}, 400, "n"),
    "id beyond the vocabulary": ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "prompt too long": ({"messages": [{"role": "user", "content": "a b c d " * 20_000}]}, 400, "messages"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_other_refusals_name_the_field_too(door: Server, case: str) -> None:
    fields, status, param = REFUSALS[case]
    found, error = refused(door, CHAT, {"model": "text", "messages": MESSAGES, **fields})
    assert (found, error["param"]) == (status, param), error


def test_a_refusal_by_the_remote_server_has_its_status(api: Server, door: Server) -> None:
    # Whether no token is left is known only after the vocabulary has been masked there.
    fields = {"prompt": "Hello", "allowed_token_ids": [7], "bad_words": ["e"], "max_tokens": 3}
    _, _, raw = post(api, "/tokenize", {"prompt": "e"})
    fields["allowed_token_ids"] = json.loads(raw)["tokens"]
    expected, error = refused(api, COMPLETIONS, {"model": "first", **fields})
    assert expected == 400
    for stream in (False, True):
        status, found = refused(door, COMPLETIONS, {"model": "text", "stream": stream, **fields})
        assert (status, found["message"]) == (400, error["message"])


def test_deadlines_end_with_length(door: Server) -> None:
    sent = remotely({"prompt": "Hello", "timeout_s": 0.5, **ENDLESS}, "text")
    for said in (whole(door, COMPLETIONS, **sent), streamed(door, COMPLETIONS, **sent)):
        assert (said.reasons, said.stop_reasons) == (["length"], ["timeout"])


def test_responses_and_messages_agree_with_the_local_door(api: Server, door: Server) -> None:
    fields: dict[str, Any] = {"input": "Hello", "max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = text_of(whole_response(api, **fields))
    assert text_of(whole_response(door, model="text", **fields)) == expected
    message: dict[str, Any] = {"messages": MESSAGES, **GREEDY}
    assert whole_message(door, model="text", **message).content == whole_message(api, **message).content
    status, error = refused(
        door, "/v1/responses", {"model": "text", "input": "a", "include": ["message.output_text.logprobs"]}
    )
    assert (status, error["param"]) == (400, "include")


def test_models_tokens_and_health(api: Server, door: Server) -> None:
    _, _, raw = post(door, "/v1/models/text", b"", "GET")
    card = json.loads(raw)
    _, _, raw = post(api, "/v1/models/first", b"", "GET")
    assert card["max_model_len"] == json.loads(raw)["max_model_len"]
    assert not card["capabilities"]["logprobs"]
    sent = {"messages": MESSAGES, "return_token_strs": True}
    assert post(door, "/tokenize", {"model": "text", **sent})[2] == post(api, "/tokenize", sent)[2]
    assert post(door, "/health", b"", "GET")[0] == 200
    status, _, raw = post(door, "/health/deep", b"", "GET")
    assert (status, set(json.loads(raw)["models"])) == (200, set(MODELS))
    status, _, raw = post(door, "/engine/snapshot?model=text", b"", "GET")
    assert status == 404
    assert "remote server" in json.loads(raw)["error"]["message"]


def test_the_metrics_are_those_of_the_server(api: Server, door: Server) -> None:
    whole(door, COMPLETIONS, **remotely({"prompt": "Hello", **GREEDY}, "text"))
    whole(api, COMPLETIONS, prompt="Hello", **GREEDY)

    def samples() -> list[str]:
        return post(door, "/metrics", b"", "GET")[2].decode().splitlines()

    def has_both() -> bool:
        ends = [each for each in samples() if each.startswith("vllm:request_success_total{")]
        return any('model="text"' in each for each in ends) and any('door="openai"' in each for each in ends)

    eventually(has_both)
    assert "naiad_openai_triton_metrics_up 1" in samples()
    # Nothing is counted twice: no sample is there for the second time.
    series = [each.rpartition(" ")[0] for each in samples() if not each.startswith("#")]
    assert len(series) == len(set(series))


def test_the_official_client(door: Server) -> None:
    client = openai.OpenAI(base_url=door.openai, api_key="none", max_retries=0)
    # Drawn, a text may be empty; then its content is never done.
    asked = client.chat.completions.stream(model="text", messages=MESSAGES, max_tokens=8, temperature=0)
    with asked as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "content.done"


def test_many_at_once(door: Server) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=door.openai, api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                text = ""
                async for chunk in await client.completions.create(
                    model=MODELS[number % 2], prompt="Hello", max_tokens=20, seed=number % 4, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*map(one, range(32)))

    texts = asyncio.run(ask_all())
    assert texts == texts[:4] * 8


def test_keys(api: Server, tiny_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    entries = [{"name": name, "sha256": digest_of(name), "tenant": name} for name in ("one", "two")]
    keys.write_text(json.dumps({"keys": entries}))
    keys.chmod(0o600)
    body = {"model": "text", "prompt": "one two three four five six seven eight nine ten " * 8, **GREEDY}

    def num_cached(door: Server, key: str) -> int:
        status, _, raw = post(door, COMPLETIONS, body, Authorization=f"Bearer {key}")
        assert status == 200, raw
        return int(json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"])

    with running_door(api.grpc, tiny_dir, "--api-keys", str(keys)) as locked:
        assert post(locked, COMPLETIONS, body)[0] == 401
        assert post(locked, COMPLETIONS, body, Authorization="Bearer three")[0] == 401
        eventually(lambda: post(locked, "/health", b"", "GET")[0] == 200)
        assert num_cached(locked, "one") == 0
        assert num_cached(locked, "one") > 0
        # Another tenant does not share what is cached.
        assert num_cached(locked, "two") == 0
        salted = {**body, "cache_salt": "mine"}
        status, error = refused(locked, COMPLETIONS, salted, Authorization="Bearer one")
        assert (status, error["param"]) == (400, "cache_salt")


def num_running(api: Server) -> float:
    return api.metric("vllm:num_requests_running") + api.metric("vllm:num_requests_waiting")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed(api: Server, door: Server, stream: bool, model: str) -> None:
    connection = connect(door)
    body = {"model": model, "prompt": ["Hello", "Other"], "stream": stream, "n": 2, **ENDLESS}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    eventually(lambda: num_running(api) == 4)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: num_running(api) == 0)
    eventually(lambda: api.used_blocks() == 0)


def begin_stream(door: Server) -> http.client.HTTPResponse:
    """Begin an endless stream; return the response after its first event."""
    connection = connect(door)
    body = json.dumps({"model": "text", "prompt": "Hello", "stream": True, **ENDLESS})
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def serves(door: Server, model: str) -> bool:
    body = {"model": model, "prompt": "Hello", **GREEDY}
    return post(door, COMPLETIONS, body)[0] == 200


def test_one_model_under_another_name_and_a_stop_that_lets_it_finish(api: Server, tiny_dir: Path) -> None:
    with running_door(api.grpc, tiny_dir, "--model", "text", "--served-name", "org/name") as named:
        eventually(lambda: names_of(named) == ["org/name"])
        connection = connect(named)
        body = {"prompt": "Hello", "model": "org/name", "stream": True, **ENDLESS, "max_tokens": 300}
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        named.ask_to_stop()
        assert response.read().decode().endswith("data: [DONE]\n\n")
        assert named.process.wait(60) == 0


def test_a_server_that_goes_is_found_again(api: Server, door: Server) -> None:
    sent = remotely({"prompt": "Hello", **GREEDY}, "text")
    expected, stream = whole(door, COMPLETIONS, **sent), begin_stream(door)
    (triton,) = [each for each in api.processes("tritonserver") if each.name() == "tritonserver"]
    triton.send_signal(signal.SIGKILL)
    *_, last, rest = stream.read().decode().lstrip().split("\n\n")
    assert rest == ""
    assert "connection" in json.loads(last.removeprefix("data: "))["error"]["message"]
    status, headers, raw = post(door, COMPLETIONS, {"model": "text", "prompt": "Hello", "max_tokens": 1})
    assert (status, headers.get("retry-after") in ("1", "2", "3")) == (503, True), raw
    eventually(lambda: post(door, "/health", b"", "GET")[0] == 503)
    eventually(lambda: all(serves(door, model) for model in MODELS), 120)
    assert whole(door, COMPLETIONS, **sent) == expected
    urllib.request.urlopen(f"http://{api.metrics}/metrics", timeout=10).close()
