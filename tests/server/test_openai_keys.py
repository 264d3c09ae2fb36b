"""Keys on a real server: who gets in, whose cache it is, and how much a key may use."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.messages_api import MESSAGES as ANTHROPIC
from helpers.messages_api import refused_message
from helpers.openai_api import CHAT, COMPLETIONS, MODEL, address, connect, post
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository
from naiad.openai_server.access.key_file import digest_of
from naiad.openai_server.access.policy import need_of
from naiad.openai_server.app import ServerOptions, make_app

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
ENDLESS = {**GREEDY, "prompt": "Hello", "max_tokens": 30_000, "stream": True}
# Longer than a block of the KV cache.
PROMPT = "one two three four five six seven eight nine ten " * 8
LIMITS: dict[str, dict[str, int]] = {
    "few": {"requests_per_minute": 2},
    "short": {"tokens_per_minute": 20},
    "curt": {"requests_per_minute": 1},
    "narrow": {"concurrent_requests": 1},
    "late": {"highest_priority": 5},
}


def secret(name: str) -> str:
    return f"secret-of-{name}"


def entry(name: str, tenant: str | None = None, role: str = "user") -> dict[str, Any]:
    made = {"name": name, "sha256": digest_of(secret(name)), "tenant": tenant or name, "role": role}
    return {**made, "limits": LIMITS.get(name, {})}


ENTRIES = [
    entry("user", "acme"),
    entry("colleague", "acme"),
    entry("stranger", "other"),
    entry("boss", "acme", "operator"),
    *map(entry, LIMITS),
]


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"keys": entries}))
    path.chmod(0o600)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write(path, ENTRIES)
    return path


@pytest.fixture(scope="module")
def api(
    tiny_dir: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory, leaving: Leaving
) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("openai") / "repository"
    create_repository(repository, tiny_dir, "--kv-cache-bytes", "64000000")
    options = ("--openai-port", "0", "--api-keys", str(key_file))
    with running(leaving, repository, *options) as server:
        yield server


def ask(server: Server, name: str, path: str = COMPLETIONS, **fields: Any) -> tuple[int, dict[str, str], Any]:
    """Send a request with a key; return status, headers and the body."""
    body = {**GREEDY, **({"prompt": "Hello"} if path == COMPLETIONS else {}), **fields}
    status, headers, raw = post(server, path, body, Authorization=f"Bearer {secret(name)}")
    return status, headers, json.loads(raw) if not fields.get("stream") else raw


def routes() -> list[tuple[str, str]]:
    """The method and a path of every route of the server that needs a key."""
    found = set()
    for route in make_app(ServerOptions(server_pid=os.getpid())).router.routes():
        resource = route.resource
        assert resource is not None
        if need_of(resource.canonical, metrics_open=False) != "nothing" and route.method != "HEAD":
            found.add((route.method, resource.canonical.replace("{name}", MODEL)))
    return sorted(found)


def status_of(server: Server, path: str, method: str, **headers: str) -> int:
    """The status of an answer whose body is not read: a stream of events may have no end."""
    connection = connect(server)
    connection.request(method, path, b"{", {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    response.close()
    connection.close()
    return response.status


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_route_that_is_not_public_needs_a_key(api: Server, method: str, path: str) -> None:
    encoded = path.replace("/", "%2f")
    for sent in (
        path,
        f"/{path}",
        f"{path}/",
        f"/{encoded[3:]}",
        f"/{encoded}",
        path.upper(),
        f"{path}?x=/health",
    ):
        for key in ({}, {"Authorization": "Bearer none"}, {"x_api_key": "none"}, {"Authorization": "Bearer"}):
            status, headers, raw = post(api, sent, b"{", method, **key)
            assert status == 401, (sent, key)
            assert headers["www-authenticate"] == "Bearer"
            error = json.loads(raw)["error"]
            if "code" in error:
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            else:
                assert path.startswith("/v1/messages")
                assert error["type"] == "authentication_error"
            assert post(api, sent, b"{", method, Host="rebound.example", **key)[0] == 403
    known = {"Authorization": f"Bearer {secret('user')}"}
    needs_operator = need_of(path, metrics_open=False) == "operator"
    assert (status_of(api, path, method, **known) == 403) == needs_operator
    assert post(api, path, b"{", method, Host="rebound.example", **known)[0] == 403
    assert post(api, f"/{path}", b"{", method, **known)[0] == 404
    assert post(api, f"{path}/x%2fhealth", b"{", "GET", **known)[0] in (403, 404, 405)


@pytest.mark.parametrize(
    "path", ["/metrics", "/health/deep", "/v1/nothing", "//health", "/health%2f", "/.env"]
)
def test_nobody_without_a_key_learns_which_routes_there_are(api: Server, path: str) -> None:
    assert post(api, path, b"", "GET")[0] == 401
    assert post(api, path, b"", "HEAD")[0] == 401
    assert post(api, path, b"", "GET", x_api_key=secret("user"))[0] in (403, 404)


@pytest.mark.parametrize("path", ["/metrics", "/health/deep", "/v1/models"])
def test_an_operator_may_ask_for_everything(api: Server, path: str) -> None:
    assert post(api, path, b"", "GET", Authorization=f"Bearer {secret('boss')}")[0] == 200


def test_public_routes_need_none(api: Server) -> None:
    assert post(api, "/health", b"", "GET")[0] == 200
    assert post(api, "/health", b"", "HEAD")[0] == 200
    assert post(api, "/health", b"{}", "POST")[0] == 401


@pytest.mark.parametrize("head", ["", "Authorization: Bearer none\r\n"])
def test_a_key_is_checked_before_the_body_is_read(api: Server, head: str) -> None:
    host, _, port = address(api).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        words = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
        # None of the body is sent.
        connection.sendall(f"{words}Content-Length: 900000000\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")


def test_the_official_client_with_a_key(api: Server) -> None:
    client = openai.OpenAI(base_url=api.openai, api_key=secret("user"), max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, seed=1)
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == chat.choices[0].message.content
    with pytest.raises(openai.AuthenticationError) as wrong:
        openai.OpenAI(base_url=api.openai, api_key="none", max_retries=0).models.list()
    assert wrong.value.code == "invalid_api_key"


def cached(server: Server, name: str, prompt: str, **fields: Any) -> int:
    status, _, answer = ask(server, name, prompt=prompt, **fields)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_tenants_share_no_cached_prefix(api: Server) -> None:
    assert cached(api, "user", PROMPT) == 0
    again = cached(api, "user", PROMPT)
    assert again > 0
    assert cached(api, "colleague", PROMPT) == again
    assert cached(api, "stranger", PROMPT) == 0
    assert cached(api, "stranger", PROMPT) == again


def computed_tokens(server: Server, name: str, prompt: str) -> tuple[int, int]:
    """Ask for a token; return how many prompt tokens the engine computed, and in how many steps."""

    def totals() -> dict[str, Any]:
        found: dict[str, Any] = engine_view(server, "boss")["totals"]
        return found

    eventually(lambda: engine_view(server, "boss")["running"] == 0)
    before = totals()
    assert ask(server, name, prompt=prompt, max_tokens=1)[0] == 200
    # The engine tells of a step a little after its token.
    eventually(lambda: totals()["total_output_tokens"] > before["total_output_tokens"])
    after = totals()
    num_steps = after["total_steps"] - before["total_steps"]
    return sum(after["steps"]["prefill_tokens"][-num_steps:]), num_steps


def test_what_a_tenant_has_cached_saves_another_no_work(api: Server) -> None:
    """The time to the first token follows the work, so it tells nothing either."""
    prompt = f"This is what somebody asked: {PROMPT}"
    whole = computed_tokens(api, "user", prompt)
    saved = computed_tokens(api, "colleague", prompt)
    assert saved[0] < whole[0]
    assert computed_tokens(api, "stranger", prompt) == whole


def test_a_salt_divides_a_tenants_cache_and_opens_no_others(api: Server) -> None:
    prompt = f"salted {PROMPT}"
    assert cached(api, "user", prompt, cache_salt="s") == 0
    assert cached(api, "user", prompt, cache_salt="t") == 0
    assert cached(api, "user", prompt) == 0
    assert cached(api, "colleague", prompt, cache_salt="s") > 0
    assert cached(api, "stranger", prompt, cache_salt="s") == 0
    # Nor does Triton's door, whose requests have no key.
    body = {"text_input": prompt, "max_tokens": 1, "return_num_cached_tokens": True}
    for salt in ("s", "acme", "acme\0s", ""):
        status, text = api.post("/v2/models/text/generate", {**body, "cache_salt": salt})
        assert status == 200, text
        assert json.loads(text)["num_cached_tokens"] == 0


def test_a_priority_beyond_the_keys_is_refused(api: Server) -> None:
    for name, priority, expected in [("user", -1, "0 … 100"), ("late", 4, "5 … 100"), ("late", 0, "5 … 100")]:
        status, _, answer = ask(api, name, priority=priority)
        assert status == 400
        assert answer["error"]["param"] == "priority"
        assert f"priority = {priority}: expected {expected} with the key {name}" in answer["error"]["message"]
    for name, fields in [("user", {"priority": 0}), ("late", {"priority": 5}), ("late", {})]:
        assert ask(api, name, **fields)[0] == 200


def test_requests_a_minute(api: Server) -> None:
    status, headers, _ = ask(api, "few")
    assert status == 200
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    status, headers, _ = ask(api, "few", stream=True)
    assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert "x-ratelimit-limit-tokens" not in headers
    status, headers, answer = ask(api, "few")
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"].endswith("s")
    client = openai.OpenAI(base_url=api.openai, api_key=secret("few"), max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=MODEL, prompt="Hello")
    # What asks for no work is not counted, and other keys have limits of their own.
    assert [model.id for model in client.models.list()] == [MODEL]
    assert ask(api, "user")[0] == 200


def test_tokens_a_minute(api: Server) -> None:
    status, headers, answer = ask(api, "short", CHAT, messages=MESSAGES, max_tokens=8)
    assert status == 200
    assert answer["usage"]["total_tokens"] > 20
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("20", "0")
    status, headers, answer = ask(api, "short")
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "20 tokens a minute" in answer["error"]["message"]
    assert int(headers["retry-after"]) >= 1


def begin_stream(server: Server, name: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = connect(server)
    headers = {"Content-Type": "application/json", "x-api-key": secret(name)}
    connection.request("POST", COMPLETIONS, json.dumps(ENDLESS), headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return connection, response


def test_keys_and_limits_in_the_words_of_anthropic(api: Server) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30}
    status, error = refused_message(api, body)
    assert (status, error.error.type) == (401, "authentication_error")
    assert post(api, ANTHROPIC, body, x_api_key=secret("user"))[0] == 200
    statuses = [post(api, ANTHROPIC, body, x_api_key=secret("curt"))[0] for _ in range(2)]
    assert statuses == [200, 429]
    status, error = refused_message(api, body, x_api_key=secret("curt"))
    assert (status, error.error.type) == (429, "rate_limit_error")


def test_requests_at_the_same_time(api: Server) -> None:
    connection, response = begin_stream(api, "narrow")
    status, headers, answer = ask(api, "narrow")
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert headers["retry-after"] == "1"
    assert ask(api, "user")[0] == 200
    response.close()
    connection.close()
    eventually(lambda: ask(api, "narrow")[0] == 200)


def engine_view(server: Server, name: str) -> dict[str, Any]:
    status, _, raw = post(
        server, "/engine/snapshot", b"", method="GET", Authorization=f"Bearer {secret(name)}"
    )
    assert status == 200, raw
    view: dict[str, Any] = json.loads(raw)
    return view


def test_a_key_sees_its_tenants_requests_and_an_operator_all(api: Server) -> None:
    streams = [begin_stream(api, name) for name in ("user", "stranger")]
    eventually(lambda: len(engine_view(api, "boss")["requests"]) == 2)
    (own,), (others,) = (engine_view(api, name)["requests"] for name in ("colleague", "stranger"))
    assert own["id"] != others["id"]
    assert own["tenant"] != others["tenant"]
    assert [each["tenant"] for each in engine_view(api, "user")["tenants"]] == [own["tenant"]]
    assert len(engine_view(api, "boss")["tenants"]) == 2
    assert engine_view(api, "late")["requests"] == []
    assert [engine_view(api, name)["running"] for name in ("colleague", "late", "boss")] == [1, 0, 2]
    assert [engine_view(api, name)["totals"] is None for name in ("colleague", "boss")] == [True, False]
    connection = connect(api)
    connection.request("GET", "/engine/events", headers={"Authorization": f"Bearer {secret('stranger')}"})
    response = connection.getresponse()
    assert response.readline() == b"event: snapshot\n"
    told = json.loads(response.readline().removeprefix(b"data: "))
    assert [each["id"] for each in told["requests"]] == [others["id"]]
    for sender, answer in (*streams, (connection, response)):
        answer.close()
        sender.close()
    eventually(lambda: engine_view(api, "boss")["requests"] == [])


def test_keys_are_read_again_on_sighup(api: Server, key_file: Path) -> None:
    (before,) = api.processes("naiad.openai_server")
    connection, response = begin_stream(api, "stranger")
    write(key_file, [*[each for each in ENTRIES if each["name"] != "stranger"], entry("new")])
    assert ask(api, "new")[0] == 401
    api.process.send_signal(signal.SIGHUP)
    eventually(lambda: ask(api, "new")[0] == 200)
    assert ask(api, "stranger")[0] == 401
    # What is under way goes on.
    assert any(response.readline().startswith(b"data: ") for _ in range(10))
    connection.close()
    # What a key has used stays used.
    assert ask(api, "few")[0] == 429

    key_file.write_text('{"keys": [5]}')
    api.process.send_signal(signal.SIGHUP)
    words = f"naiad openai: the old keys stay: --api-keys {key_file}: entry 1: expected an object"
    eventually(lambda: any(words in line for line in api.lines))
    assert ask(api, "new")[0] == 200
    assert api.processes("naiad.openai_server") == [before]


def test_a_server_that_is_started_again_beside_a_wrong_file_has_the_old_keys(
    api: Server, key_file: Path
) -> None:
    write(key_file, [*ENTRIES, entry("kept")])
    api.process.send_signal(signal.SIGHUP)
    eventually(lambda: ask(api, "kept")[0] == 200)
    key_file.write_text('{"keys": [5]}')
    (before,) = api.processes("naiad.openai_server")
    before.kill()
    before.wait(30)

    def serves() -> bool:
        try:
            return ask(api, "kept")[0] == 200
        except OSError:
            return False

    eventually(serves, 60)
    assert ask(api, "new")[0] == 401
    words = f"the old keys stay: --api-keys {key_file}: entry 1: expected an object"
    eventually(lambda: any(words in line for line in api.lines))


def test_a_server_that_is_started_again_has_its_keys(api: Server, key_file: Path) -> None:
    write(key_file, [*ENTRIES, entry("ninth")])
    (before,) = api.processes("naiad.openai_server")
    before.kill()
    before.wait(30)
    # A signal while it starts is not lost and ends nothing.
    eventually(lambda: bool(api.processes("naiad.openai_server")))
    api.process.send_signal(signal.SIGHUP)

    def serves() -> bool:
        try:
            return ask(api, "stranger")[0] == 200
        except OSError:
            return False

    eventually(serves, 60)
    assert post(api, "/v1/models", b"", "GET")[0] == 401
    eventually(lambda: any("naiad openai: read 9 keys again" in line for line in api.lines))
    assert len(api.processes("naiad.openai_server")) == 1
