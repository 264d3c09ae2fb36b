"""What is known of an answer: where it begins and where it ends, wherever its bytes are cut."""

from __future__ import annotations

import pytest

from helpers.gate_doors import LAST_CHUNK, STREAM_HEAD, chunk
from naiad.gate.upstream import Upstream

PIECES = chunk(b"data: 0\n\n") + chunk(b"0\n") + chunk(b"d") + LAST_CHUNK
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n\r\n0\r\n\r\nrest"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Transport:
    """The connection to the server, of which nothing is sent."""

    is_aborted = False

    def write(self, data: bytes) -> None:
        assert not self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


class Client:
    """Notes what comes, and after how many bytes each answer had ended."""

    closes_after_answer = False

    def __init__(self) -> None:
        self.received = b""
        self.ends: list[int] = []

    def pass_on(self, data: bytes) -> None:
        self.received += data

    def answer_ended(self) -> None:
        self.ends.append(len(self.received))

    def upstream_lost(self, upstream: Upstream) -> None:
        raise AssertionError


def an_upstream() -> tuple[Upstream, Client, Transport]:
    client, transport = Client(), Transport()
    upstream = Upstream(client)
    upstream.connection_made(transport)  # type: ignore[arg-type]
    return upstream, client, transport


def feed(upstream: Upstream, data: bytes) -> None:
    upstream.get_buffer(-1)[: len(data)] = data
    upstream.buffer_updated(len(data))


@pytest.mark.parametrize("answer", [STREAM_HEAD + PIECES, STREAM_HEAD + LAST_CHUNK, LENGTH, EMPTY])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_an_answer_ends_where_it_ends_however_it_is_cut(answer: bytes, size: int) -> None:
    upstream, client, transport = an_upstream()
    for number in range(1, 3):
        upstream.send(b"GET")
        for at in range(0, len(answer), size):
            feed(upstream, answer[at : at + size])
        assert (client.received, client.ends[-1]) == (answer * number, len(answer) * number)
    assert (len(client.ends), transport.is_aborted) == (2, False)


@pytest.mark.parametrize("answer", [STREAM_HEAD + PIECES, LENGTH])
def test_every_single_cut(answer: bytes) -> None:
    for at in range(1, len(answer)):
        upstream, client, transport = an_upstream()
        upstream.send(b"GET")
        feed(upstream, answer[:at])
        assert client.ends == []
        feed(upstream, answer[at:])
        assert (client.received, client.ends) == (answer, [len(answer)])
        assert not transport.is_aborted


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"x" * 70_000,
        EMPTY + b"x",
    ],
)
def test_what_is_no_answer_ends_the_connection(answer: bytes) -> None:
    upstream, _, transport = an_upstream()
    upstream.send(b"GET")
    for at in range(0, len(answer), 30_000):
        feed(upstream, answer[at : at + 30_000])
    assert transport.is_aborted
