"""A connection to the server's HTTP port, for the requests of one client's connection."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Protocol

from naiad.gate.request_head import END

# What has been read is copied before the next connection reads, so one buffer is enough.
_buffer = memoryview(bytearray(64 * 1024))
_MAX_HEAD = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9][0-9]) [^\r\n]*")
# The end of a body in chunks. Triton sends only JSON in chunks, and JSON has no such characters.
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Client(Protocol):
    """Who gets the answers."""

    def pass_on(self, data: bytes) -> None:
        """Send a part of an answer."""

    def answer_ended(self) -> None:
        """The answer is complete."""

    def upstream_lost(self, upstream: Upstream) -> None:
        """The connection has ended; there will be no more of an answer."""

    @property
    def closes_after_answer(self) -> bool:
        """Whether the client's connection is closed after the answer."""


class Upstream(asyncio.BufferedProtocol):
    """Passes answers on as they come; of their bodies it reads nothing but the end."""

    def __init__(self, client: Client) -> None:
        """Set up for this client."""
        self._client = client
        self._transport: Any = None
        self._head: bytearray | None = None
        # Of a body with a length; None: it comes in chunks, or there is no answer.
        self._missing: int | None = None
        self._tail = b""
        self._is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server has taken the connection."""
        self._transport = transport

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> None:
        """Send a request; its answer comes before the next one."""
        self._is_answering, self._head = True, bytearray()
        self._transport.write(request)

    def pause(self) -> None:
        """Read no more until `resume`."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def close(self) -> None:
        """Close at once; the server ends the request when it notices."""
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next part is read to."""
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass the next part on."""
        data = bytes(_buffer[:nbytes])
        if self._head is None:
            self._take_body(data)
        elif not self._is_answering:
            self._fail()
        else:
            self._head += data
            self._take_head()

    def eof_received(self) -> None:
        """The server has closed the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._client.upstream_lost(self)

    def _take_head(self) -> None:
        assert self._head is not None
        end = self._head.find(END)
        if end < 0:
            if len(self._head) > _MAX_HEAD:
                self._fail()
            return
        head, body = bytes(self._head[:end]), bytes(self._head[end + len(END) :])
        self._head = None
        if not self._read_framing(head):
            self._fail()
            return
        if self._client.closes_after_answer:
            head += b"\r\nConnection: close"
        self._tail = _LAST_CHUNK[:2]
        self._client.pass_on(head + END)
        self._take_body(body)

    def _read_framing(self, head: bytes) -> bool:
        """Learn where the body ends; return whether the answer is understood."""
        status, *lines = head.split(b"\r\n")
        self._missing = None
        is_chunked = False
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.strip().lower(), value.strip()
            if name == b"content-length" and value.isdigit():
                self._missing = int(value)
            is_chunked |= name == b"transfer-encoding" and value.lower() == b"chunked"
        return _STATUS.fullmatch(status) is not None and is_chunked == (self._missing is None)

    def _take_body(self, data: bytes) -> None:
        if data:
            self._client.pass_on(data)
        if self._missing is None:
            size = len(_LAST_CHUNK)
            self._tail = data[-size:] if len(data) >= size else (self._tail + data)[-size:]
            has_ended = self._tail == _LAST_CHUNK
        else:
            self._missing -= len(data)
            if self._missing < 0:
                self._fail()
                return
            has_ended = self._missing == 0
        if has_ended:
            self._is_answering, self._head = False, bytearray()
            self._client.answer_ended()

    def _fail(self) -> None:
        """End both connections: the server has sent what is no answer."""
        self._transport.abort()
