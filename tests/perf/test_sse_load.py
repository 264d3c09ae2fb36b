from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from perf.server.load import PROTOCOLS, llm_inputs, text_inputs
from perf.server.serve_process import Served
from perf.server.sse_load import event_streams

from helpers.ports import free_port
from naiad.errors import InternalError

NUM_STREAMS = 8
PATH = "/v2/models/text/generate_stream"


class _Handler(BaseHTTPRequestHandler):
    """Says what the request's `text_input` names."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body.get("text_input", "ids")
        if said == "refused":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error":"no such field"}')
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if said == "waits for all":
            with suppress(threading.BrokenBarrierError):
                self.server.all_came.wait()  # type: ignore[attr-defined]
        for event in _EVENTS.get(said, [{"text_output": "a\u2028"}, {"text_output": "b"}]):
            line = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        if said != "breaks":
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nothing."""


_EVENTS: dict[str, list[dict[str, Any]]] = {
    "fails": [{"text_output": "a"}, {"error": "too long"}],
    "ids": [{"output_ids": [5, 6]}, {"output_ids": 7}],
}


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.all_came = threading.Barrier(NUM_STREAMS, timeout=30)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.all_came.abort()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_all_streams_run_at_once_and_each_keeps_its_events_in_order(url: str) -> None:
    bodies = [{"text_input": "waits for all"}] * NUM_STREAMS
    assert (
        event_streams(url, PATH, bodies) == [[{"text_output": "a\u2028"}, {"text_output": "b"}]] * NUM_STREAMS
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("refused", 'HTTP 400: {"error":"no such field"}'),
        ("fails", "HTTP 200: too long"),
        ("breaks", "a stream broke"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(url: str, said: str, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        event_streams(url, PATH, [{"text_input": "fine"}, {"text_input": said}])


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InternalError, match=r"a connection broke: .*refused"):
        event_streams(f"127.0.0.1:{free_port()}", PATH, [{"text_input": "fine"}])


def test_silence_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.server.sse_load._SILENCE_S", 0.5)
    with pytest.raises(InternalError, match=r"2 streams said nothing for 0\.5 s"):
        event_streams(url, PATH, [{"text_input": "waits for all"}] * 2)


def test_values_are_those_of_all_events_whether_one_or_several(url: str) -> None:
    answers, server = PROTOCOLS["sse"], Served(url, "", "")
    assert answers(server, "text", [text_inputs("fine", 2)], "text_output") == [["a\u2028".encode(), b"b"]]
    assert answers(server, "llm", [llm_inputs([1, 2], 3)], "output_ids") == [[5, 6, 7]]
