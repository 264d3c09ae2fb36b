"""Serves the gate's ports until the process is told to stop."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field

from naiad.gate.grpc_door import GRPCDoor
from naiad.gate.grpc_methods import INFERENCE as INFERENCE_METHODS
from naiad.gate.grpc_methods import MODEL_CONTROL as MODEL_CONTROL_METHODS
from naiad.gate.http_door import HTTPDoor
from naiad.gate.limits import Limits
from naiad.gate.routes import INFERENCE, METRICS, MODEL_CONTROL, RouteTable
from naiad.hosts import AllowedHosts

# `naiad serve` stops the gate when all requests have ended; this is for connections that linger.
_SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of the three protocols."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The gate's settings.

    Attributes:
        host: address to listen on.
        ports: ports to listen on.
        server: the server's ports, on loopback.
        allowed_hosts: names that a request's Host may have, besides addresses and localhost.
        allowed_origins: origins whose pages may ask.
        has_model_control: whether models may be loaded and unloaded.
        limits: the limits.
        parent_pid: the process with which this one ends; None: the one above it.
    """

    host: str
    ports: Ports
    server: Ports
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    has_model_control: bool = False
    limits: Limits = field(default_factory=Limits)
    parent_pid: int | None = None


SERVER_HOST = "127.0.0.1"


async def serve(options: GateOptions) -> None:
    """Serve until SIGTERM.

    Raises:
        OSError: an address cannot be listened on.
    """
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with Gate(options):
        await stopped.wait()


class Gate:
    """The three doors; an asynchronous context manager."""

    def __init__(self, options: GateOptions) -> None:
        """Set up; nothing listens yet."""
        self._options = options
        is_open = options.has_model_control
        hosts = AllowedHosts(options.allowed_hosts)

        def http_door(routes: RouteTable, port: int) -> HTTPDoor:
            server = (SERVER_HOST, port)
            return HTTPDoor(routes, server, options.limits, hosts, options.allowed_origins)

        routes = RouteTable((*INFERENCE, *(MODEL_CONTROL if is_open else ())))
        self.http = http_door(routes, options.server.http)
        self.metrics = http_door(RouteTable(METRICS), options.server.metrics)
        methods = {**INFERENCE_METHODS, **(MODEL_CONTROL_METHODS if is_open else {})}
        self.grpc = GRPCDoor(methods, f"{SERVER_HOST}:{options.server.grpc}", options.limits)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Gate:
        """Listen on all ports.

        Raises:
            OSError: an address cannot be listened on.
        """
        host, ports = self._options.host, self._options.ports
        await self.http.listen(host, ports.http)
        await self.metrics.listen(host, ports.metrics)
        await self.grpc.listen(host, ports.grpc)
        doors = (self.http, self.metrics, self.grpc)
        self._tasks = [asyncio.create_task(door.watch()) for door in doors]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(door.close(_SHUTDOWN_S) for door in (self.http, self.metrics, self.grpc)))
