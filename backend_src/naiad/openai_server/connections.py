"""Closes connections that do not send the headers of a request in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ConnectionWatch:
    """Gives each connection a time for headers, from its start or from their first byte on.

    A connection that waits for its client's next request may stay.
    """

    def __init__(self, timeout_s: float) -> None:
        """Set up; `timeout_s` is the time that headers may take."""
        self._timeout_s = timeout_s

    def around(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return what makes watched connections of those that `make` makes."""
        return lambda: _Connection(make(), self._timeout_s)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Take note that a request's headers have come."""
        transport = request.transport
        connection = None if transport is None else transport.get_protocol()
        if not isinstance(connection, _Connection):
            return await handler(request)
        connection.begin()
        try:
            return await handler(request)
        finally:
            connection.end()


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol."""

    def __init__(self, inner: Any, timeout_s: float) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._has_request = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A request's headers are complete: what comes next is its body."""
        self._has_request = True
        self._stop_timer()

    def end(self) -> None:
        """The request has been answered: what comes next are headers."""
        self._has_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._start_timer()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._has_request:
            self._start_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()  # type: ignore[no-any-return]

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._inner.connection_lost(exc)

    def _start_timer(self) -> None:
        assert self._transport is not None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
