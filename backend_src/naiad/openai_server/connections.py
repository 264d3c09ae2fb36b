"""Refuses connections for which there is no room, and closes those that do not send headers in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from naiad.descriptors import raise_descriptor_limit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# For the sockets of engines, files of the page, and what Python opens.
_KEPT_DESCRIPTORS = 256
# A connection that waits for its client's next request for longer may be closed to make room.
MIN_IDLE_S = 5.0
_BODY = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":null}}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def room_for_connections() -> int:
    """Raise the process' soft limit of descriptors to the hard one; return how many connections it allows."""
    limit = raise_descriptor_limit()
    return limit - min(_KEPT_DESCRIPTORS, limit // 2)


class ConnectionWatch:
    """Admits connections, and gives each a time for headers, from its start or from their first byte on.

    A connection that waits for its client's next request may stay. Once as many as may be are open, the one
    that has waited longest makes room for a further one. Where none has waited for `MIN_IDLE_S` the further
    one gets status 503, so that the server keeps descriptors for its own work.
    """

    def __init__(self, timeout_s: float, max_connections: int) -> None:
        """Set up.

        Args:
            timeout_s: the time that headers may take.
            max_connections: how many may be open at the same time.
        """
        self.timeout_s = timeout_s
        self._max_connections = max_connections
        self._num_open = 0
        # Since when connections wait, the longest first.
        self._idle: dict[_Connection, float] = {}

    def around(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return what makes watched connections of those that `make` makes."""
        return lambda: _Connection(self, make)

    def admit(self) -> bool:
        """Count a new connection, if there is room for it."""
        if self._num_open >= self._max_connections and not self._make_room():
            return False
        self._num_open += 1
        return True

    def _make_room(self) -> bool:
        """Close the connection that has waited longest, if that is long enough; return whether it is."""
        longest = next(iter(self._idle), None)
        if longest is None or time.monotonic() - self._idle[longest] < MIN_IDLE_S:
            return False
        self.is_busy(longest)
        longest.close()
        return True

    def forget(self, connection: _Connection) -> None:
        """An admitted connection has ended."""
        self._num_open -= 1
        self.is_busy(connection)

    def is_idle(self, connection: _Connection) -> None:
        """Take note that a connection waits for its client's next request from now on."""
        self._idle.pop(connection, None)  # the longest wait comes first
        self._idle[connection] = time.monotonic()

    def is_busy(self, connection: _Connection) -> None:
        """Take note that a connection does not wait any more."""
        self._idle.pop(connection, None)

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
    """Passes everything on to aiohttp's protocol, which a refused connection never gets."""

    def __init__(self, watch: ConnectionWatch, make: Callable[[], asyncio.Protocol]) -> None:
        self._watch = watch
        self._make = make
        self._inner: Any = None
        self._has_request = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A request's headers are complete: what comes next is its body."""
        self._has_request = True
        # It may have come with the request before it.
        self._watch.is_busy(self)
        self._stop_timer()

    def end(self) -> None:
        """The request has been answered: what comes next are headers."""
        self._has_request = False
        # A request whose client has left is answered after its connection was lost.
        if self._transport is not None and not self._transport.is_closing():
            self._watch.is_idle(self)

    def close(self) -> None:
        """Close it once everything has been sent."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._watch.admit():
            transport.write(_REFUSAL)
            transport.close()
            return
        self._transport = transport
        self._inner = self._make()
        self._start_timer()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            return
        if not self._has_request:
            self._watch.is_busy(self)
            self._start_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        if self._inner is None:
            return None
        return self._inner.eof_received()  # type: ignore[no-any-return]

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is None:
            return
        self._watch.forget(self)
        self._stop_timer()
        self._inner.connection_lost(exc)

    def _start_timer(self) -> None:
        assert self._transport is not None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._watch.timeout_s, self._transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
