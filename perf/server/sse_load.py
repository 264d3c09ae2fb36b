"""Many concurrent streams of server-sent events, by a client that takes almost no CPU time.

For a user that decodes each event on arrival see `sse`.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from typing import Any

from naiad.errors import InternalError

_SILENCE_S = 120.0
_NUM_READ_BYTES = 65536

Event = dict[str, Any]


def event_streams(url: str, model: str, bodies: Sequence[Mapping[str, Any]]) -> list[list[Event]]:
    """Send all requests to `generate_stream` at once and return the events of each stream.

    Received bytes are decoded only when all streams have ended.

    Args:
        url: HOST:PORT of the server's HTTP endpoint.
        model: the model's name.
        bodies: the JSON of each request.

    Raises:
        InternalError: the server answered with an error, or not at all.
    """
    with selectors.DefaultSelector() as selector:
        received: list[bytearray] = []
        try:
            for body in bodies:
                connection = _send(url, model, json.dumps(body).encode())
                received.append(bytearray())
                selector.register(connection, selectors.EVENT_READ, received[-1])
            _receive(selector)
        except OSError as error:
            raise InternalError(f"a connection broke: {error}") from error
        finally:
            for key in list(selector.get_map().values()):
                _hang_up(selector, key.fileobj)
    return [_events(bytes(each)) for each in received]


def _send(url: str, model: str, body: bytes) -> socket.socket:
    host, _, port = url.rpartition(":")
    head = (
        f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: {url}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=_SILENCE_S)
    try:
        connection.sendall(head.encode() + body)
    except OSError:
        connection.close()
        raise
    return connection


def _receive(selector: selectors.BaseSelector) -> None:
    """Receive until the server has closed every connection."""
    while selector.get_map():
        ready = selector.select(_SILENCE_S)
        if not ready:
            raise InternalError(f"{len(selector.get_map())} streams said nothing for {_SILENCE_S:g} s")
        for key, _ in ready:
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(_NUM_READ_BYTES)
            key.data.extend(piece)
            if not piece:
                _hang_up(selector, key.fileobj)


def _hang_up(selector: selectors.BaseSelector, connection: Any) -> None:
    selector.unregister(connection)
    connection.close()


class _Received:
    """The part of a socket that `HTTPResponse` needs."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _mode: str) -> BytesIO:
        return BytesIO(self._raw)


def _events(raw: bytes) -> list[Event]:
    answer = HTTPResponse(_Received(raw))  # type: ignore[arg-type]
    try:
        answer.begin()
        text = answer.read().decode()
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    except (HTTPException, ValueError) as error:
        raise InternalError(f"a stream broke: {type(error).__name__} after {len(raw)} bytes") from error
    error = next((event["error"] for event in events if "error" in event), None)
    if answer.status != 200 or error is not None:
        raise InternalError(f"HTTP {answer.status}: {error or text.strip()}")
    return events
