"""A public HTTP port: accepts connections, and says which requests pass."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from naiad.gate.http_connection import ClientConnection
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError
from naiad.gate.request_head import RequestHead
from naiad.gate.routes import Route, RouteTable
from naiad.hosts import AllowedHosts

_LOOK_S = 1.0
_BACKLOG = 512
_NOT_ENCODED = "identity"


class HTTPDoor:
    """The port.

    Attributes:
        limits: the limits.
        server: host and port of the server behind it.
        is_stopping: whether connections are closed after their current answer.
        num_refused: number of requests that did not pass.
        num_slow_readers: number of connections ended because their client did not read.
    """

    def __init__(
        self,
        routes: RouteTable,
        server: tuple[str, int],
        limits: Limits,
        hosts: AllowedHosts,
        origins: Collection[str],
    ) -> None:
        """Set up.

        Args:
            routes: which requests pass.
            server: host and port of the server behind it.
            limits: the limits.
            hosts: names under which clients may ask.
            origins: origins whose pages may ask.
        """
        self.limits = limits
        self.server = server
        self.is_stopping = False
        self.num_refused = self.num_slow_readers = 0
        self._routes = routes
        self._hosts = hosts
        self._origins = frozenset(origins)
        self._connections: set[ClientConnection] = set()
        self._num_held_bytes = 0
        self._listener: asyncio.Server | None = None

    @property
    def server_address(self) -> str:
        """HOST:PORT of the server behind it."""
        return "{}:{}".format(*self.server)

    async def listen(self, host: str, port: int) -> int:
        """Accept connections from now on; return the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: ClientConnection(self), host, port, backlog=_BACKLOG, reuse_address=True
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def watch(self) -> None:
        """End the connections of clients that take too long; runs for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = asyncio.get_running_loop().time()
            for connection in [*self._connections]:
                connection.look(now_s)

    async def close(self, patience_s: float) -> None:
        """Accept nothing more, give running answers some seconds, and close all connections."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        deadline_s = asyncio.get_running_loop().time() + patience_s
        while self._connections and asyncio.get_running_loop().time() < deadline_s:
            for connection in [*self._connections]:
                if connection.is_waiting:
                    connection.close()
            await asyncio.sleep(0.02)
        for connection in [*self._connections]:
            connection.close()

    def admit(self, connection: ClientConnection) -> bool:
        """Take a new connection, if there is room."""
        if len(self._connections) >= self.limits.max_connections:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: ClientConnection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)

    def hold(self, num_bytes: int) -> None:
        """Count bytes of bodies that are being received.

        Raises:
            RefusedError: all together they are too many.
        """
        self._num_held_bytes += num_bytes
        if num_bytes and self._num_held_bytes > self.limits.max_bodies_bytes:
            self._num_held_bytes -= num_bytes
            raise RefusedError(503, "too many large requests come at the same time", "Retry-After: 1\r\n")

    def release(self, num_bytes: int) -> None:
        """These bytes are no longer held."""
        self._num_held_bytes -= num_bytes

    def check(self, head: RequestHead) -> Route:
        """Return the route of a request whose body has not come yet.

        Raises:
            RefusedError: the request does not pass.
        """
        headers = head.headers
        name = self._hosts.refused_name(headers.get("host", "localhost"))
        if name is not None:
            expected = "an address, localhost, or a name of --gate-allowed-host"
            raise RefusedError(403, f"Host = {name!r} is not allowed: expected {expected}")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            raise RefusedError(
                403, f"Origin = {origin[:80]!r} is not allowed: expected one of --gate-allowed-origin"
            )
        route = self._routes.find(head)
        if headers.get("content-encoding", _NOT_ENCODED).lower() != _NOT_ENCODED:
            raise RefusedError(415, "Content-Encoding: expected a body that is not compressed")
        if headers.get("expect", "100-continue").lower() != "100-continue":
            raise RefusedError(417, "Expect: expected 100-continue")
        if head.is_http_10 and head.target.endswith(("/generate", "/generate_stream")):
            raise RefusedError(505, "an answer of unknown length needs HTTP/1.1")
        return route
