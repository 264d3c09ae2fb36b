"""Serves the application until the process is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Collection

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from naiad.errors import StartupError
from naiad.log_lines import LineFormatter, LogFormat
from naiad.openai_server.access.gate import Gate
from naiad.openai_server.app import HEALTH, ServerOptions, make_app
from naiad.openai_server.connections import ConnectionWatch, room_for_connections
from naiad.openai_server.protocol import protocols_of

logger = logging.getLogger(__name__)

# `naiad serve` stops its server when all requests have ended; this is for connections that linger.
_SHUTDOWN_S = 2.0
_MAX_UNACCEPTED = 128


async def serve(
    options: ServerOptions,
    gate: Gate | None,
    host: str,
    port: int,
    *,
    stop_signals: Collection[signal.Signals] = (signal.SIGTERM,),
    shutdown_s: float = _SHUTDOWN_S,
    listens: Callable[[int], None] = lambda _port: None,
) -> None:
    """Serve until one of the signals; read the keys again on SIGHUP, and be not ready from SIGUSR1 on.

    Args:
        options: the server's settings.
        gate: checks keys; None: nobody needs one.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        stop_signals: end it.
        shutdown_s: seconds that requests get to finish.
        listens: called with the port when it accepts connections.

    Raises:
        OSError: the address cannot be listened on.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_worth_a_line)
    # Each text is encoded by the thread that asks for it, and not by a pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in stop_signals:
        loop.add_signal_handler(each, stopped.set)
    if gate is not None:
        loop.add_signal_handler(signal.SIGHUP, _reload, gate)
    connections = ConnectionWatch(options.header_timeout_s, room_for_connections())
    app = make_app(options, gate, connections)
    loop.add_signal_handler(signal.SIGUSR1, app[HEALTH].announce_stop)
    # The process above starts this one with the signals blocked, so that none comes too early.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGUSR1})
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_s)
    await runner.setup()
    server = runner.server
    assert server is not None
    try:
        listener = await loop.create_server(
            connections.around(protocols_of(server)), host, port, backlog=_MAX_UNACCEPTED
        )
        try:
            listens(listener.sockets[0].getsockname()[1])
            await stopped.wait()
        finally:
            listener.close()
    finally:
        await runner.cleanup()


def write_log(log_format: LogFormat) -> None:
    """Write the records of `logging` to stderr: warnings of all libraries, and what Naiad says."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(log_format, "naiad openai"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("naiad").setLevel(logging.INFO)


def _reload(gate: Gate) -> None:
    try:
        num_keys = gate.reload()
    except StartupError as error:
        logger.error("the old keys stay: %s", error)
    else:
        logger.info("read %d keys again", num_keys)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a record is not about a request that is no HTTP: whoever can connect could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
