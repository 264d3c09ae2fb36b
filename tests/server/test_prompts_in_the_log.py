"""No word of a prompt is in what a server prints, whether the request is served, refused or fails."""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.openai_api import CHAT, COMPLETIONS, post
from helpers.raw_grpc import ENDLESS, ask, text_inputs
from helpers.server import Leaving, Server, eventually, start_repository
from helpers.tiny_repository import create_repository
from naiad.log_lines import LOG_FORMATS, LogFormat

WORD = "Quizzaciously"
PROMPT = f"{WORD} said the cat, and {WORD} the dog"
LONG = PROMPT * 2000
MODELS = ("ensemble", "text")
GENERATE, STREAM = "/v2/models/ensemble/generate", "/v2/models/text/generate_stream"
# The server's standard error goes to the file that is the next word.
APART = ("sh", "-c", 'exec "$@" 2>"$0"')
LEVELS = {"debug", "info", "warning", "error"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def grpc_errors(server: Server, model: str, **fields: Any) -> list[str]:
    return ask(server.grpc, model, text_inputs(PROMPT, 4) | fields).errors


def http_status(server: Server, path: str, **fields: Any) -> int:
    return server.post(path, {"text_input": PROMPT, "max_tokens": 4, **fields})[0]


def openai_status(server: Server, path: str, **fields: Any) -> int:
    prompt = {"messages": user(PROMPT)} if path == CHAT else {"prompt": PROMPT}
    return post(server, path, {"model": "first", "max_tokens": 4, **prompt, **fields})[0]


def serve_at_each_door(server: Server) -> None:
    for model in MODELS:
        assert grpc_errors(server, model) == []
    assert http_status(server, GENERATE) == http_status(server, STREAM, stream=True) == 200
    for path in (COMPLETIONS, CHAT):
        assert openai_status(server, path) == openai_status(server, path, stream=True) == 200


def refuse_at_each_door(server: Server) -> None:
    """A field is wrong, and in turn the prompt itself."""
    for model in MODELS:
        for wrong in ({"top_p": 2.0}, {"text_input": LONG}, {"text_input": PROMPT.encode() + b"\xff"}):
            assert len(grpc_errors(server, model, **wrong)) == 1
    assert ask(server.grpc, "nobody", text_inputs(PROMPT, 4)).errors != []
    for path in (GENERATE, STREAM):
        for value in (LONG, [PROMPT, PROMPT], {"text": PROMPT}, PROMPT + "\ud800"):
            # Triton answers an object with 500.
            assert http_status(server, path, text_input=value) >= 400
        assert http_status(server, path, top_p=2.0) == 400
    for path in (COMPLETIONS, CHAT):
        assert openai_status(server, path, top_p=2.0) == openai_status(server, path, surprise=1) == 400
        assert openai_status(server, path, model="nobody") == 404
    for prompt in (LONG, {"text": PROMPT}, [PROMPT, 5], PROMPT + "\ud800"):
        assert openai_status(server, COMPLETIONS, prompt=prompt) == 400
    for content in (
        LONG,
        {"text": PROMPT},
        [{"type": "text", "txt": PROMPT}],
        [{"type": "x", "text": PROMPT}],
    ):
        assert openai_status(server, CHAT, messages=user(content)) == 400


def send_what_is_no_json(server: Server) -> None:
    broken = f'{{"prompt": "{PROMPT}", "text_input": "{PROMPT}", "messages": ["{PROMPT}"'.encode()
    for path in (COMPLETIONS, CHAT):
        assert post(server, path, broken)[0] == 400
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", GENERATE, broken)
    assert connection.getresponse().status == 400
    connection.close()


def fail_at_each_door(server: Server) -> None:
    """The engine is killed while requests of every door run."""
    long = {"max_tokens": ENDLESS, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        by_grpc = [pool.submit(grpc_errors, server, model, **long) for model in MODELS]
        by_http = [
            pool.submit(http_status, server, GENERATE, **long),
            *(pool.submit(openai_status, server, path, **long) for path in (COMPLETIONS, CHAT)),
        ]
        eventually(lambda: server.metric("vllm:num_requests_running") == 5, 60)
        server.processes("naiad.engine_process")[0].kill()
        assert [len(each.result()) for each in by_grpc] == [1, 1]
        # Triton answers every failure of `generate` with 400.
        assert min(each.result() for each in by_http) >= 400
    eventually(lambda: grpc_errors(server, "ensemble") == [], 60)


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_no_word_of_a_prompt_is_printed(
    tmp_path: Path, tiny_dir: Path, leaving: Leaving, log_format: LogFormat
) -> None:
    create_repository(tmp_path / "repository", tiny_dir, "--kv-cache-bytes", "64000000")
    options = ("--gate", "on", "--openai-port", "0", "--log-format", log_format)
    server = start_repository(
        *("--model-repository", str(tmp_path / "repository"), *options),
        around=(*APART, str(tmp_path / "log")),
    )
    try:
        serve_at_each_door(server)
        refuse_at_each_door(server)
        send_what_is_no_json(server)
        fail_at_each_door(server)
    finally:
        leaving.take(server)
    assert server.stop() == 0
    log = (tmp_path / "log").read_text()
    assert "the engine process ended" in log
    assert WORD.lower() not in (log + "".join(server.lines)).lower()
    if log_format == "json":
        lines = [json.loads(line) for line in log.splitlines()]
        for fields in lines:
            assert TIME.fullmatch(fields["time"])
            assert fields["level"] in LEVELS
        ended = [fields for fields in lines if "the engine process ended" in fields["message"]]
        assert {(fields["source"], fields["level"]) for fields in ended} == {("naiad model", "error")}
