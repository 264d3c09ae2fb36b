"""The client over Triton's HTTP endpoint."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from naiad_client import Client, ServerError
from naiad_client.__main__ import main


class Endpoint:
    """A `generate_stream` that answers with made-up events."""

    def __init__(self) -> None:
        self.status = 200
        self.is_event = False
        self.events: list[dict[str, Any]] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.goes_on_for_ever = False
        self.was_closed = threading.Event()
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append((self.path, body))
                endpoint.answer(self)

            def log_message(self, *_: object) -> None:  # type: ignore[override]
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(self.status)
        if self.status != 200:
            body = b"data: " * self.is_event + json.dumps(self.events[0]).encode()
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
            return
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        try:
            for event in self.events:
                self._send(handler, b"data: " + json.dumps(event).encode() + b"\n\n")
            while self.goes_on_for_ever:
                self._send(handler, b'data: {"text_output": "x"}\n\n')
            handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.was_closed.set()

    @staticmethod
    def _send(handler: http.server.BaseHTTPRequestHandler, content: bytes) -> None:
        handler.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_events_become_chunks(endpoint: Endpoint) -> None:
    endpoint.events = [
        {"text_output": "Par", "num_output_tokens": 1, "num_input_tokens": 5},
        {"text_output": "is", "num_output_tokens": 2, "finish_reason": "stop"},
    ]
    with Client(endpoint.url + "/", model="my model") as client:
        chunks = list(client.generate("capital?", max_tokens=3, temperature=1, request_id="r1"))
    assert [(chunk.text, chunk.num_output_tokens, chunk.finish_reason) for chunk in chunks] == [
        ("Par", 1, None),
        ("is", 2, "stop"),
    ]
    path, body = endpoint.asked[0]
    assert path == "/v2/models/my%20model/generate_stream"
    assert body.items() >= {"text_input": "capital?", "max_tokens": 3, "stream": True, "id": "r1"}.items()
    assert isinstance(body["temperature"], float)


def test_a_refusal_has_the_servers_message(endpoint: Endpoint) -> None:
    endpoint.status, endpoint.events = 400, [{"error": "the prompt is empty"}]
    with Client(endpoint.url) as client, pytest.raises(ServerError, match=r"^the prompt is empty$"):
        list(client.generate(""))


@pytest.mark.parametrize("form", ["event", "OpenAI's"])
def test_a_refusal_in_another_form_has_the_servers_message(endpoint: Endpoint, form: str) -> None:
    endpoint.status, endpoint.is_event = 400, form == "event"
    endpoint.events = [{"error": "it is wrong" if form == "event" else {"message": "it is wrong"}}]
    with Client(endpoint.url) as client, pytest.raises(ServerError, match=r"^it is wrong$"):
        list(client.generate(""))


def read_request(connection: socket.socket) -> None:
    """Read a whole request: what is closed with something unread resets its connection."""
    with connection.makefile("rb") as file:
        num_bytes = 0
        while (line := file.readline()).strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                num_bytes = int(value)
        assert len(file.read(num_bytes)) == num_bytes > 0


def test_what_is_no_http_is_shown_as_letters() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\0\0\x12\x04\0\0\0\0\0\x1b[31m" * 40 + b"\n")
                read_request(connection)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerError) as told:
            list(client.generate("?"))
    assert "does not answer as Triton's HTTP endpoint does" in str(told.value)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("asks", [True, False])
def test_an_answer_that_is_cut_off_is_an_error(endpoint: Endpoint, asks: bool) -> None:
    """Whoever does not ask for the finish reason can not be told."""
    endpoint.events = [{"text_output": "Par"}]
    with Client(endpoint.url) as client:
        chunks = client.generate("capital?", return_finish_reason=asks)
        assert next(chunks).text == "Par"
        if asks:
            with pytest.raises(ServerError, match="ended the connection before the answer was whole") as told:
                next(chunks)
            assert told.value.status == "UNAVAILABLE"
        assert list(chunks) == []


@pytest.mark.parametrize(
    ("head", "message"),
    [(b"400 Bad Request", "status 400 of"), (b"200 OK", "does not answer as Triton's HTTP endpoint does")],
)
def test_what_is_nested_too_deeply_is_told(head: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                read_request(connection)
                connection.sendall(b"HTTP/1.1 " + head + b"\r\n\r\ndata: " + b"[" * 50_000 + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerError, match=message):
            list(client.generate("?"))


@pytest.mark.parametrize(
    ("head", "message"),
    [(b"400 Bad Request", "status 400 of"), (b"200 OK", "an event is longer than 16777216 bytes")],
)
def test_what_a_server_says_without_an_end_is_not_kept(head: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                read_request(connection)
                connection.sendall(b"HTTP/1.1 " + head + b"\r\n\r\ndata: ")
                while True:
                    connection.sendall(b" " * (1 << 16))

        speaker = threading.Thread(target=answer, daemon=True)
        speaker.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerError, match=message):
            list(client.generate("?"))
        speaker.join(60)
        assert not speaker.is_alive()


def test_a_port_that_is_none_is_refused_with_the_url() -> None:
    with pytest.raises(ValueError, match=r"url = 'http://a:99999': .*expected HOST:PORT"):
        Client("http://a:99999")


@pytest.mark.parametrize(
    "url", ["http://127..0.1:8000", "http://a b:8000", "http://a:8000/b c", "http://a:8000/ü"]
)
def test_a_url_that_can_not_be_asked_is_refused_in_a_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capital?", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: url = '{url}': ")
    assert error.endswith("expected HOST:PORT, http://HOST:PORT or https://HOST:PORT\n")
    assert error.count("\n") == 1


def test_an_error_within_a_stream_ends_it(endpoint: Endpoint) -> None:
    endpoint.events = [{"text_output": "Par"}, {"error": "the engine was lost"}]
    with Client(endpoint.url) as client:
        generation = client.generate("capital?")
        assert next(generation).text == "Par"
        with pytest.raises(ServerError, match="the engine was lost"):
            next(generation)
        assert list(generation) == []


def test_a_generation_that_is_closed_ends_at_the_server(endpoint: Endpoint) -> None:
    endpoint.goes_on_for_ever = True
    with Client(endpoint.url) as client, client.generate("on and on") as generation:
        assert next(generation).text == "x"
    assert endpoint.was_closed.wait(10)
    assert list(generation) == []


def test_without_a_server_the_error_names_the_url() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1"):
        list(client.generate("?"))


def test_the_command_takes_such_a_url(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.events = [{"text_output": "Paris", "num_output_tokens": 1, "finish_reason": "stop"}]
    assert main(["capital?", "--url", endpoint.url]) == 0
    assert capsys.readouterr().out == "Paris\n"
