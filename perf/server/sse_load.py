"""Many concurrent streams of server-sent events, by a client that takes almost no CPU time.

For a user that decodes each event on arrival see `sse`.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from typing import Any

from naiad.errors import InternalError

_SILENCE_S = 120.0
_NUM_READ_BYTES = 65536
# No event of JSON contains a line feed, so this is found nowhere else.
_BEGIN = b"\ndata: {"

Event = dict[str, Any]


@dataclass(slots=True)
class _Received:
    """What has come on a connection.

    Attributes:
        raw: all bytes.
        counts: number of bytes after each piece.
        times_s: when that piece came, in seconds since the requests were sent.
    """

    raw: bytearray = field(default_factory=bytearray)
    counts: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


def event_streams(url: str, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[list[Event]]:
    """Send all requests at once and return the events of each stream; see `timed_event_streams`."""
    return [[event for _, event in stream] for stream in timed_event_streams(url, path, bodies)]


def timed_event_streams(
    url: str, path: str, bodies: Sequence[Mapping[str, Any]]
) -> list[list[tuple[float, Event]]]:
    """Send all requests at once and return the events of each stream with their times of arrival.

    Received bytes are decoded only when all streams have ended.

    Args:
        url: HOST:PORT of the server's HTTP endpoint.
        path: of the endpoint.
        bodies: the JSON of each request.

    Returns:
        For each request its events, each with the seconds since the first request was sent.

    Raises:
        InternalError: the server answered with an error, or not at all.
    """
    began_s = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        received: list[_Received] = []
        try:
            for body in bodies:
                connection = _send(url, path, json.dumps(body).encode())
                received.append(_Received())
                selector.register(connection, selectors.EVENT_READ, received[-1])
            _receive(selector, began_s)
        except OSError as error:
            raise InternalError(f"a connection broke: {error}") from error
        finally:
            for key in list(selector.get_map().values()):
                _hang_up(selector, key.fileobj)
    return [_timed_events(each) for each in received]


def _send(url: str, path: str, body: bytes) -> socket.socket:
    host, _, port = url.rpartition(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {url}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=_SILENCE_S)
    try:
        connection.sendall(head.encode() + body)
    except OSError:
        connection.close()
        raise
    return connection


def _receive(selector: selectors.BaseSelector, began_s: float) -> None:
    """Receive until the server has closed every connection."""
    while selector.get_map():
        ready = selector.select(_SILENCE_S)
        if not ready:
            raise InternalError(f"{len(selector.get_map())} streams said nothing for {_SILENCE_S:g} s")
        for key, _ in ready:
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(_NUM_READ_BYTES)
            key.data.raw.extend(piece)
            key.data.counts.append(len(key.data.raw))
            key.data.times_s.append(time.perf_counter() - began_s)
            if not piece:
                _hang_up(selector, key.fileobj)


def _hang_up(selector: selectors.BaseSelector, connection: Any) -> None:
    selector.unregister(connection)
    connection.close()


def _timed_events(received: _Received) -> list[tuple[float, Event]]:
    raw = bytes(received.raw)
    events = _events(raw)
    times_s = []
    place = raw.find(_BEGIN)
    while place >= 0:
        times_s.append(received.times_s[bisect_right(received.counts, place)])
        place = raw.find(_BEGIN, place + 1)
    if len(times_s) != len(events):
        raise InternalError(f"a stream has {len(events)} events, of which {len(times_s)} begin a line")
    return list(zip(times_s, events, strict=True))


class _Answer:
    """The part of a socket that `HTTPResponse` needs."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _mode: str) -> BytesIO:
        return BytesIO(self._raw)


def _events(raw: bytes) -> list[Event]:
    answer = HTTPResponse(_Answer(raw))  # type: ignore[arg-type]
    try:
        answer.begin()
        text = answer.read().decode()
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    except (HTTPException, ValueError) as error:
        raise InternalError(f"a stream broke: {type(error).__name__} after {len(raw)} bytes") from error
    said = next((event["error"] for event in events if "error" in event), None)
    if answer.status != 200 or said is not None:
        raise InternalError(f"HTTP {answer.status}: {said or text.strip()}")
    return events
