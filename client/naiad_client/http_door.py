"""Triton's HTTP endpoint `generate_stream`, for urls that begin with http:// or https://."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from naiad_client.errors import ServerError
from naiad_client.generation import Answer, Chunk, Generation
from naiad_client.wire import TensorValue, checked_values

_DATA = b"data:"
_MAX_SHOWN = 200
_MAX_ERROR_BYTES, _MAX_EVENT_BYTES = 1 << 16, 1 << 24

_Value = TypeVar("_Value", str, int)


class HTTPDoor:
    """Starts generations, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        """Set up for http://HOST:PORT.

        Raises:
            ValueError: the url has no host, or its host, port or path can not be asked for.
        """
        expected = "expected HOST:PORT, http://HOST:PORT or https://HOST:PORT"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            # As a connection would: a host name has no part that is empty or longer than 63 letters.
            host.encode("idna")
        except ValueError as error:
            raise ValueError(f"url = {url!r}: {error}: {expected}") from None
        names = host + parts.path
        is_plain = names.isprintable() and " " not in names and parts.path.isascii()
        if not host or not is_plain or parts.query or parts.fragment:
            raise ValueError(f"url = {url!r}: {expected}")
        self.url = url
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._kind: type[http.client.HTTPConnection] = kind
        self._host, self._port, self._path = host, port, parts.path.rstrip("/")

    def start(self, model: str, tensors: Mapping[str, TensorValue | None], request_id: str) -> Generation:
        """Send a request.

        Raises:
            ServerError: the server can not be reached.
            ValueError: a value does not fit its tensor's type.
        """
        body = checked_values(tensors) | ({"id": request_id} if request_id else {})
        connection = self._kind(self._host, self._port)
        try:
            path = f"{self._path}/v2/models/{quote(model, safe='')}/generate_stream"
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        except OSError as error:
            connection.close()
            raise ServerError(f"no server can be reached at {self.url}: {error}", "UNAVAILABLE") from None
        tells_end = bool(body.get("return_finish_reason"))
        return Generation(read_answers(connection, self.url, tells_end), lambda: _stop(connection))

    def close(self) -> None:
        """Do nothing: each connection ends with its generation."""


def read_answers(
    connection: http.client.HTTPConnection, url: str, tells_end: bool = False
) -> Iterator[Answer]:
    """Yield the events of a request that was sent.

    Args:
        connection: on which it was sent.
        url: of the server, for messages.
        tells_end: whether the last event has a finish reason. Without it an answer that is cut off can not be
            told from a whole one: `http.client` takes the end of a connection for the end of what it brings.

    Raises:
        ServerError: the server refuses the request, ends it with an error, answers in another way, or goes
            before the answer has ended.
    """
    is_whole = not tells_end
    try:
        with contextlib.closing(connection), connection.getresponse() as response:
            if response.status != http.HTTPStatus.OK:
                raise ServerError(
                    _message(response.read(_MAX_ERROR_BYTES), f"status {response.status} of {url}")
                )
            while line := response.readline(_MAX_EVENT_BYTES):
                if len(line) == _MAX_EVENT_BYTES:
                    raise ValueError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")
                if line.startswith(_DATA):
                    chunk = _chunk(json.loads(line.removeprefix(_DATA)))
                    is_whole = not tells_end or chunk.finish_reason is not None
                    yield chunk, False
    except (OSError, http.client.HTTPException, OverflowError, RecursionError, ValueError) as error:
        words = _shown(str(error)) or type(error).__name__
        raise ServerError(f"{url} does not answer as Triton's HTTP endpoint does: {words}") from None
    if not is_whole:
        raise ServerError(f"{url} ended the connection before the answer was whole", "UNAVAILABLE")


def _chunk(event: Any) -> Chunk:
    """Read an event.

    Raises:
        ServerError: it tells of an error.
        ValueError: it is none of Triton's.
    """
    if not isinstance(event, dict):
        raise ValueError("an event is no JSON object")
    if "error" in event:
        raise ServerError(str(event["error"]))
    return Chunk(
        text=_value(event, "text_output", ""),
        finish_reason=_value(event, "finish_reason", "") or None,
        num_output_tokens=_value(event, "num_output_tokens", 0),
        num_input_tokens=_value(event, "num_input_tokens", 0),
    )


def _value(event: dict[str, Any], name: str, default: _Value) -> _Value:
    """A field of an event, or the default if it is missing or null."""
    value = event.get(name)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise ValueError(f"{name} is a JSON {type(value).__name__}")
    return value


def _message(body: bytes, otherwise: str) -> str:
    """What the server says: an object or an event with `error`, which has a `message` in OpenAI's API."""
    try:
        error = json.loads(body.strip().removeprefix(_DATA))["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return otherwise


def _shown(text: str) -> str:
    """A text of a server that speaks in another way, such as frames of HTTP/2."""
    return "".join(each if each.isprintable() else "�" for each in text[:_MAX_SHOWN])


def _stop(connection: http.client.HTTPConnection) -> None:
    # A thread may be reading: to close the connection would not wake it.
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
