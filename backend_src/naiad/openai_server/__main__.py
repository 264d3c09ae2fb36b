"""Runs the server: `python -m naiad.openai_server --server-pid N --port N`. `naiad serve` starts it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from naiad.errors import ConfigError, StartupError
from naiad.freed_memory import limit_arenas, return_large_pieces
from naiad.log_lines import LOG_FORMATS
from naiad.openai_server.access.gate import Gate
from naiad.openai_server.access.policy import is_loopback
from naiad.openai_server.api.parsing.families import CALL_CHOICES, REASONING_CHOICES, FamilyChoices
from naiad.openai_server.app import ServerOptions
from naiad.openai_server.fallbacks import Fallbacks
from naiad.openai_server.serving import serve, write_log
from naiad.parent_watch import end_with_parent
from naiad.tracing.exporter import Collector

# What is freed in pieces so large goes back to the system at once.
_LARGE_PIECE_BYTES = 512 * 1024

logger = logging.getLogger("naiad.openai_server")


def parse(arguments: Sequence[str]) -> tuple[ServerOptions, Gate | None, str, int]:
    """Return the settings, the keys, the host and the port; exits on a bad option.

    Raises:
        StartupError: the file of keys is wrong, or there is none although others can reach the host.
    """
    parser = argparse.ArgumentParser(prog="naiad.openai_server", description=__doc__)
    add = parser.add_argument
    add("--server-pid", type=int, required=True, help="the process above the Triton servers")
    add("--parent-pid", type=int, help="the process with which this one ends (default: the one above)")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, required=True, help="port to listen on")
    add("--allowed-host", action="append", default=[], help="a name that a request's Host may have")
    add("--allowed-origin", action="append", default=[], help="an origin whose pages may call the server")
    add("--lenient", action="store_true", help="pass over unknown fields, and count them")
    add("--metrics-url", default=None, help="address of the page of Triton's metrics port")
    add("--api-keys", type=Path, help="a file of keys, one of which a request needs")
    add("--last-good-keys", type=Path, help="a private file that keeps keys for the next start")
    add("--metrics-open", action="store_true", help="the metrics need no key")
    add("--reasoning", choices=REASONING_CHOICES, default="auto", help="how models write what they reason")
    add("--tool-parser", choices=CALL_CHOICES, default="auto", help="how models write calls of tools")
    add("--fallback", action="append", default=[], help="MODEL=OTHER: OTHER answers while MODEL cannot")
    add("--record", type=Path, help="record requests in this file")
    add("--record-prompts", action="store_true", help="record prompts and outputs, too")
    add("--header-timeout-s", type=float, default=30.0, help="seconds that the headers of a request may take")
    add("--slow-reader-s", type=float, default=60.0, help="a client that takes nothing for so long is gone")
    add("--otlp-endpoint", help="the OTLP/HTTP address of a collector, which gets the spans of requests")
    add("--log-format", choices=LOG_FORMATS, default=LOG_FORMATS[0], help="how lines are written")
    args = parser.parse_args(arguments)
    write_log(args.log_format)
    gate = (
        None
        if args.api_keys is None
        else Gate(args.api_keys, metrics_open=args.metrics_open, last_good=args.last_good_keys)
    )
    if gate is None and not is_loopback(args.host):
        raise ConfigError("--host", args.host, "a loopback address, or --api-keys")
    options = ServerOptions(
        server_pid=args.server_pid,
        parent_pid=args.parent_pid,
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allowed_origin),
        is_lenient=args.lenient,
        metrics_url=args.metrics_url,
        families=FamilyChoices(args.reasoning, args.tool_parser),
        fallbacks=Fallbacks.parse("--fallback", args.fallback),
        record=args.record,
        records_prompts=args.record_prompts,
        header_timeout_s=args.header_timeout_s,
        slow_reader_s=args.slow_reader_s,
        collector=None
        if args.otlp_endpoint is None
        else Collector.parse("--otlp-endpoint", args.otlp_endpoint),
    )
    return options, gate, args.host, args.port


def main() -> int:
    """Parse the command line and serve."""
    # The loop has one to itself. The dict of interned strings, two megabytes that are made anew every ten
    # minutes, moves between the two.
    limit_arenas(2)
    return_large_pieces(_LARGE_PIECE_BYTES)
    try:
        options, gate, host, port = parse(sys.argv[1:])
    except StartupError as error:
        logger.error("%s", error)
        return 1
    end_with_parent(lambda: None, options.parent_pid)
    # Ctrl-C reaches the terminal's whole process group; the process above stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(serve(options, gate, host, port))
    except OSError as error:
        logger.error("%s:%d can not be listened on: %s", host, port, error.strerror)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
