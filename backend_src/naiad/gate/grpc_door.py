"""The public gRPC port: accepts connections, and counts what they hold together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from naiad.gate.grpc_connection import GRPCConnection
from naiad.gate.grpc_methods import MethodKind
from naiad.gate.limits import Limits
from naiad.gate.turns import Turns

_LOOK_S = 1.0
# Beyond this share of all calls, those that bring nothing have to make room.
_FULL_SHARE = 7 / 8
_BACKLOG = 512


class GRPCDoor:
    """The port.

    Attributes:
        methods: path of a method → how it passes.
        limits: the limits.
        turns: the work on messages, of all connections.
        server_address: HOST:PORT of the server behind it.
        is_stopping: whether new calls are refused.
        num_refused: number of requests that did not pass.
        num_slow_readers: number of streams and connections ended because their client did not read.
    """

    def __init__(self, methods: Mapping[str, MethodKind], server: str, limits: Limits) -> None:
        """Set up.

        Args:
            methods: path of a method → how it passes.
            server: HOST:PORT of the server behind it.
            limits: the limits.
        """
        self.methods = methods
        self.limits = limits
        self.turns = Turns()
        self.server_address = server
        self.is_stopping = False
        self.num_refused = self.num_slow_readers = 0
        self._connections: set[GRPCConnection] = set()
        self._num_calls = self._num_held_bytes = self._num_inflated_bytes = 0
        self._listener: asyncio.Server | None = None

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of the server behind it."""
        host, _, port = self.server_address.rpartition(":")
        return host.strip("[]"), int(port)

    async def listen(self, host: str, port: int) -> int:
        """Accept connections from now on; return the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: GRPCConnection(self), host, port, backlog=_BACKLOG, reuse_address=True
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def watch(self) -> None:
        """End the streams and connections of clients that take too long; runs for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = asyncio.get_running_loop().time()
            for connection in [*self._connections]:
                connection.look(now_s)
            self._make_room(now_s)

    async def close(self, patience_s: float) -> None:
        """Accept nothing more, give running calls some seconds, and close all connections."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in [*self._connections]:
            connection.leave()
            connection.flush()
        deadline_s = asyncio.get_running_loop().time() + patience_s
        while self._connections and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.02)
        for connection in [*self._connections]:
            connection.end("the gate is being stopped")

    def admit(self, connection: GRPCConnection) -> bool:
        """Take a new connection, if there is room."""
        if self.is_stopping or len(self._connections) >= self.limits.max_connections:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: GRPCConnection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)

    def admit_call(self) -> bool:
        """Count a new call, if there is room."""
        if self._num_calls >= self.limits.max_connections:
            return False
        self._num_calls += 1
        return True

    def call_ended(self) -> None:
        """A call that was counted is over."""
        self._num_calls -= 1

    def hold(self, num_bytes: int, num_inflated: int) -> bool:
        """Count bytes that are held of calls, if there is room; fewer of them with negative numbers.

        Args:
            num_bytes: all of them.
            num_inflated: those of requests that came compressed.
        """
        limits = self.limits
        if num_bytes > 0 and self._num_held_bytes + num_bytes > limits.max_bodies_bytes:
            return False
        if num_inflated > 0 and self._num_inflated_bytes + num_inflated > limits.max_inflated_bytes:
            return False
        self._num_held_bytes += num_bytes
        self._num_inflated_bytes += num_inflated
        return True

    def _make_room(self, now_s: float) -> None:
        """End calls that bring nothing while nearly no room is left, first those that were quiet longest."""
        num_surplus = self._num_calls - int(self.limits.max_connections * _FULL_SHARE)
        if num_surplus <= 0:
            return
        quiet = [
            (call.quiet_since_s, connection, call)
            for connection in self._connections
            for call in connection.quiet_calls(now_s)
        ]
        for _, connection, call in sorted(quiet, key=lambda each: each[0])[:num_surplus]:
            connection.end_quiet(call)
