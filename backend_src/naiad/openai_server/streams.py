"""Streams of server-sent events, and the watch over those that are silent or stuck."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiohttp import web

from naiad.openai_server.route import IS_GONE

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies such as nginx would otherwise hold chunks back.
    "X-Accel-Buffering": "no",
}
_WATCH_S = 1.0
# What is shorter fits into the buffers of the connection, and a client that takes less takes nothing.
_LONG_BYTES = 64 * 1024
# The system would take some megabytes, the answers of many minutes, before a client's silence is noticed.
_SEND_BUFFER_BYTES = 128 * 1024


def event(data: bytes, name: str = "") -> bytes:
    """Frame JSON as an event, with a name if it has one."""
    begin = f"event: {name}\n".encode() if name else b""
    return begin + b"data: " + data + b"\n\n"


class EventStream:
    """The response of one streamed request."""

    def __init__(
        self, request: web.Request, nudge: Callable[[], None], headers: Mapping[str, str] = _HEADERS
    ) -> None:
        """Set up.

        Args:
            request: the request that it answers.
            nudge: wakes the stream's writer, so that it sends a comment.
            headers: the response's headers.
        """
        self.nudge = nudge
        self._request = request
        self._response = web.StreamResponse(headers=headers)
        self._loop = asyncio.get_running_loop()
        self.last_written_s = self._loop.time()
        self.is_writing = False
        self._num_unsent = 0

    @property
    def response(self) -> web.StreamResponse:
        """The response to return to aiohttp."""
        return self._response

    async def open(self) -> None:
        """Send the headers."""
        transport: Any = self._request.transport
        connection = None if transport is None else transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with self._noting_that_it_is_gone():
            await self._response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Write events; waits while the client does not read what was written before.

        Raises:
            ConnectionResetError: the client is gone.
        """
        self.is_writing = True
        self.last_written_s = self._loop.time()
        self._num_unsent = sys.maxsize
        with self._noting_that_it_is_gone():
            await self._response.write(data)
        self.is_writing = False

    @contextlib.contextmanager
    def _noting_that_it_is_gone(self) -> Iterator[None]:
        try:
            yield
        except ConnectionResetError:
            self._request[IS_GONE] = True
            raise

    async def comment(self) -> None:
        """Write a comment, which clients pass over."""
        await self.write(_COMMENT)

    def silent_s(self) -> float:
        """Seconds since something was written or, while that takes long, since the client has taken more."""
        transport: Any = self._request.transport
        if self.is_writing and transport is not None:
            num_unsent = transport.get_write_buffer_size()
            if num_unsent <= self._num_unsent - _LONG_BYTES:
                self._num_unsent, self.last_written_s = num_unsent, self._loop.time()
        return self._loop.time() - self.last_written_s

    def abort(self) -> None:
        """Close the connection without sending what is written."""
        transport: Any = self._request.transport
        if transport is not None:
            transport.abort()


class StreamWatch:
    """Keeps silent streams alive, and ends those whose client has stopped to read."""

    def __init__(self, keep_alive_s: float, slow_reader_s: float) -> None:
        """Set up.

        Args:
            keep_alive_s: a stream that is silent for so long gets a comment.
            slow_reader_s: a client that takes nothing for so long is gone.
        """
        self._keep_alive_s = keep_alive_s
        self._slow_reader_s = slow_reader_s
        self.streams: set[EventStream] = set()
        self._answers: set[EventStream] = set()

    async def answer(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        """Answer with JSON; a client that does not read a long one is ended like that of a stream."""
        if len(raw) < _LONG_BYTES:
            return web.Response(body=raw, content_type="application/json")
        headers = {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        stream = EventStream(request, lambda: None, headers)
        # The client may be gone; then nobody is left to be told.
        with contextlib.suppress(ConnectionResetError):
            await stream.open()
            self._answers.add(stream)
            try:
                await stream.write(raw)
            finally:
                self._answers.discard(stream)
        return stream.response

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for stream in [*self.streams, *self._answers]:
                silent_s = stream.silent_s()
                if stream.is_writing and silent_s > self._slow_reader_s:
                    stream.abort()
                elif not stream.is_writing and silent_s > self._keep_alive_s:
                    stream.nudge()
