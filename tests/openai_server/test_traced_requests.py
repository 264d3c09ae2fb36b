"""Requests of the OpenAI API are traced from their first byte to the last one of their answer."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from perf.server.span_collector import Received, span_collector

from helpers.scripted_model import scripted_model
from naiad.tracing.request_trace import Tracer

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CHAT = {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


def asked(url: str, path: str, body: dict[str, Any], **headers: str) -> tuple[int, str, float]:
    """Status, answer and seconds."""
    head = {"Content-Type": "application/json", **headers}
    begin_s = time.monotonic()
    request = urllib.request.Request(url + path, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode(), time.monotonic() - begin_s
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), time.monotonic() - begin_s


def one_request(
    folder: Path, path: str, body: dict[str, Any], num_spans: int, **headers: str
) -> tuple[str, float, list[Received]]:
    with span_collector() as collector:
        exporter = collector.exporter()
        with scripted_model(folder, tracer=Tracer(exporter)) as script:
            _, text, seconds = asked(script.openai, path, body, **headers)
            spans = collector.wait_for(num_spans)
        exporter.close()
    return text, seconds, spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_its_phases(tmp_path: Path, stream: bool) -> None:
    text, seconds, (root, *phases) = one_request(
        tmp_path, "/chat/completions", CHAT | {"stream": stream}, 6, traceparent=PARENT
    )
    assert [phase.name for phase in phases] == ["read", "queue", "prefill", "decode", "send"]
    assert abs(sum(phase.seconds for phase in phases) - root.seconds) < 1e-6
    # The server's thread may see the end of the answer after its client.
    assert root.seconds - phases[-1].seconds <= seconds
    assert (root.name, root.trace_id, root.parent_id) == ("chat first", PARENT[3:35], PARENT[36:52])
    assert root.attributes["gen_ai.request.stream"] is stream
    assert root.attributes["gen_ai.response.id"] in text
    assert root.attributes["gen_ai.usage.output_tokens"] > 0


def test_a_completion_without_a_parent_begins_a_trace(tmp_path: Path) -> None:
    _, _, (root, *_) = one_request(tmp_path, "/completions", {"model": "first", "prompt": "Hi"}, 6)
    assert (root.name, root.parent_id) == ("text_completion first", "")
    assert len(root.trace_id) == 32


def test_a_bad_field_is_the_error_of_its_request(tmp_path: Path) -> None:
    _, _, (root, phase) = one_request(tmp_path, "/chat/completions", CHAT | {"top_p": 7}, 2)
    assert root.attributes["error.type"] == "400"
    assert "top_p" in root.error
    assert phase.name == "read"
