"""What a real server tells those who watch its engine: rows come and go, and a restart is an event."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.openai_api import COMPLETIONS, connect, post, refused
from helpers.raw_grpc import Stream, text_inputs
from helpers.server import Leaving, Server, eventually, start_server, without_engine
from naiad.openai_server.api.engine_view import EngineView

MODEL = "checkpoint"
EVENTS, SNAPSHOT = "/engine/events", "/engine/snapshot"
PROMPT = "A secret that nobody else may read, however long the prompt is"
ENDLESS = {
    "model": MODEL,
    "prompt": PROMPT,
    "max_tokens": 30_000,
    "stream": True,
    "ignore_eos": True,
    "request_id": "mine",
}


@pytest.fixture(scope="module")
def lasting(tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    running = start_server(tiny_dir, "--dtype", "float32", "--openai-port", "0")
    yield running
    leaving.take(running)


class Watching:
    """A client that watches an engine."""

    def __init__(self, server: Server, query: str = f"?model={MODEL}") -> None:
        connection = connect(server)
        connection.request("GET", EVENTS + query)
        self.response = connection.getresponse()
        assert self.response.status == 200, self.response.read()
        assert self.response.headers["Content-Type"].startswith("text/event-stream")

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event's name and data."""
        lines: list[bytes] = []
        while not (lines and lines[-1] == b"\n"):
            line = self.response.readline()
            assert line, "the stream has ended"
            if not line.startswith(b":"):
                lines.append(line)
            if lines == [b"\n"]:
                lines.clear()  # the end of a comment
        name, data, _ = lines
        return name.decode().removeprefix("event: ").strip(), json.loads(data.removeprefix(b"data: "))

    def until(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """All events up to the next of this name."""
        events = [self.next()]
        while events[-1][0] != name:
            events.append(self.next())
        return events

    def close(self) -> None:
        self.response.close()


@pytest.fixture
def watching(lasting: Server) -> Iterator[Watching]:
    made = Watching(lasting)
    yield made
    made.close()


def look(server: Server, query: str = f"?model={MODEL}") -> dict[str, Any]:
    status, headers, raw = post(server, SNAPSHOT + query, b"", method="GET")
    assert status == 200, raw
    assert headers["content-type"].startswith("application/json")
    msgspec.json.decode(raw, type=EngineView, strict=True)
    view: dict[str, Any] = json.loads(raw)
    return view


def rows(server: Server) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in look(server)["requests"]}


def begin(server: Server, **fields: Any) -> http.client.HTTPResponse:
    """Begin an endless stream; return the response after its first event. Its `close` cancels."""
    connection = connect(server)
    connection.request(
        "POST", COMPLETIONS, json.dumps({**ENDLESS, **fields}), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def test_a_row_appears_while_its_request_runs_and_vanishes_when_it_is_cancelled(
    lasting: Server, watching: Watching
) -> None:
    stream = begin(lasting)
    eventually(lambda: "cmpl-mine" in rows(lasting))
    row = rows(lasting)["cmpl-mine"]
    assert row["state"] == "decode"
    assert row["prompt_tokens"] > 5
    assert (row["max_tokens"], row["tenant"], row["priority"]) == (ENDLESS["max_tokens"], "", 0)
    seen: list[int] = []
    while len(seen) < 3:
        for name, view in watching.until("snapshot"):
            assert name == "snapshot"
            seen += [each["output_tokens"] for each in view["requests"] if each["id"] == "cmpl-mine"]
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
    blocks = look(lasting)["totals"]["kv"][0]
    assert blocks["used"] > 0
    stream.close()
    eventually(lambda: rows(lasting) == {})
    while watching.until("snapshot")[-1][1]["requests"]:
        pass
    assert look(lasting)["totals"]["kv"][0]["used"] == 0


def test_requests_of_other_doors_have_rows_and_nobodys_prompt_is_told(lasting: Server) -> None:
    stream = begin(lasting, cache_salt="a tenant's secret", n=2)
    eventually(lambda: {"cmpl-mine", "cmpl-mine/1"} <= rows(lasting).keys())
    found: set[str] = set()

    def told() -> bool:
        _, _, raw = post(lasting, f"{SNAPSHOT}?model={MODEL}", b"", method="GET")
        text = raw.decode()
        assert "secret" not in text
        assert "nobody" not in text
        found.update(row["id"] for row in json.loads(text)["requests"])
        return any(re.fullmatch(r"#\d+", each) for each in found)

    other = Stream(lasting.grpc, "ensemble", text_inputs("Hello", 30_000, ignore_eos=True))
    eventually(told)
    other.cancel()
    # Of the tenants only the one with a name has sequences left.
    eventually(
        lambda: [(each["running"], len(each["tenant"])) for each in look(lasting)["tenants"]] == [(2, 12)]
    )
    stream.close()
    eventually(lambda: rows(lasting) == {})


def test_the_numbers_agree_with_the_metrics(lasting: Server) -> None:
    stream = begin(lasting)
    eventually(lambda: look(lasting)["running"] == lasting.metric("vllm:num_requests_running") == 1)
    assert look(lasting)["waiting"] == 0
    stream.close()
    eventually(lambda: rows(lasting) == {})
    eventually(lambda: lasting.used_blocks() == 0)
    view = look(lasting)
    (blocks,) = view["totals"]["kv"]
    assert blocks["used"] == blocks["shared"] == 0
    assert blocks["cached"] > 0
    assert (
        view["started"] == json.loads(post(lasting, "/v1/models", b"", method="GET")[2])["data"][0]["created"]
    )
    steps = view["totals"]["steps"]
    assert steps["first"] + len(steps["ms"]) == view["totals"]["total_steps"]
    assert len({len(values) for name, values in steps.items() if name != "first"}) == 1


def test_without_a_name_the_only_model_is_meant(lasting: Server) -> None:
    assert look(lasting, "")["model"] == MODEL
    nameless = Watching(lasting, "")
    assert nameless.until("snapshot")[-1][1]["model"] == MODEL
    nameless.close()


@pytest.mark.parametrize("path", [EVENTS, SNAPSHOT])
@pytest.mark.parametrize(
    ("query", "status", "words"),
    [("?model=unknown", 404, "does not exist"), ("?modle=checkpoint", 400, "unknown name 'modle'")],
)
def test_wrong_questions_are_refused(lasting: Server, path: str, query: str, status: int, words: str) -> None:
    found, error = refused(lasting, path + query, b"", method="GET")
    assert (found, words in error["message"]) == (status, True)


def test_a_stream_is_not_begun_for_one_who_asks_for_headers_alone(lasting: Server) -> None:
    status, headers, raw = post(lasting, f"{EVENTS}?model={MODEL}", b"", method="HEAD")
    assert (status, headers["content-type"], raw) == (200, "text/event-stream", b"")


def test_a_restart_of_the_engine_is_an_event(lasting: Server, watching: Watching) -> None:
    begin(lasting).close()
    eventually(lambda: look(lasting)["totals"]["total_steps"] > 0)
    before = watching.until("snapshot")[-1][1]
    while not before["totals"]["total_steps"]:
        before = watching.until("snapshot")[-1][1]
    with without_engine(lasting):
        _, notice = watching.until("away")[-1]
        assert notice["model"] == MODEL
        assert "does not serve now" in notice["message"]
        late = Watching(lasting)
        assert late.next()[0] == "away"
        status, error = refused(lasting, f"{SNAPSHOT}?model={MODEL}", b"", method="GET")
        assert (status, error["type"]) == (503, "service_unavailable_error")
    events = watching.until("snapshot")
    assert [name for name, _ in events] == ["restarted", "snapshot"]
    after = events[-1][1]
    assert after["started"] >= before["started"]
    assert after["totals"]["total_steps"] < before["totals"]["total_steps"]
    assert late.until("snapshot")[-1][1]["requests"] == []
    late.close()
