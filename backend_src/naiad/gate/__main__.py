"""Runs the gate: `python -m naiad.gate --host H --http-port N …`. `naiad serve` starts it."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

from naiad.descriptors import raise_descriptor_limit
from naiad.gate.event_loop import run
from naiad.gate.limits import Limits
from naiad.gate.serving import GateOptions, Ports, serve
from naiad.log_lines import LOG_FORMATS, LineFormatter, LogFormat
from naiad.parent_watch import end_with_parent

logger = logging.getLogger("naiad.gate")

_NUM_PORTS = 3
# For the ports themselves and what Python opens.
_KEPT_DESCRIPTORS = 64


def parse(arguments: Sequence[str]) -> tuple[GateOptions, LogFormat]:
    """Return the settings and the form of the log; exits on a bad option."""
    parser = argparse.ArgumentParser(prog="naiad.gate", description=__doc__)
    add = parser.add_argument
    default = Limits()
    add("--parent-pid", type=int, help="the process with which this one ends (default: the one above)")
    add("--host", required=True, help="address to listen on")
    for name in ("http", "grpc", "metrics"):
        add(f"--{name}-port", type=int, required=True, help="port to listen on")
        add(f"--server-{name}-port", type=int, required=True, help="the server's port, on loopback")
    add("--allowed-host", action="append", default=[], help="a name that a request's Host may have")
    add("--allowed-origin", action="append", default=[], help="an origin whose pages may ask")
    add("--model-control", action="store_true", help="models may be loaded and unloaded")
    add("--max-body-bytes", type=int, default=default.max_body_bytes, help="largest body or message")
    add("--max-connections", type=int, default=default.max_connections, help="at the same time, of each port")
    add(
        "--slow-reader-s",
        type=float,
        default=default.slow_reader_s,
        help="a client that takes nothing is gone",
    )
    add("--log-format", choices=LOG_FORMATS, default=LOG_FORMATS[0], help="how lines are written")
    args = parser.parse_args(arguments)
    limits = Limits(
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        slow_reader_s=args.slow_reader_s,
    )
    options = GateOptions(
        host=args.host,
        ports=Ports(http=args.http_port, grpc=args.grpc_port, metrics=args.metrics_port),
        server=Ports(
            http=args.server_http_port, grpc=args.server_grpc_port, metrics=args.server_metrics_port
        ),
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allowed_origin),
        has_model_control=args.model_control,
        limits=limits,
        parent_pid=args.parent_pid,
    )
    return options, args.log_format


def make_room(limits: Limits) -> None:
    """Let the process open as many descriptors as it may; warn if its connections may need more."""
    most = raise_descriptor_limit()
    # The server's end of a connection takes another one.
    needed = _NUM_PORTS * 2 * limits.max_connections + _KEPT_DESCRIPTORS
    if most < needed:
        logger.warning(
            "the hard limit of file descriptors is %d: expected at least %d for %d connections of each port "
            "(--gate-max-connections)",
            most,
            needed,
            limits.max_connections,
        )


def main() -> int:
    """Parse the command line and serve."""
    options, log_format = parse(sys.argv[1:])
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(log_format, "naiad gate"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    end_with_parent(lambda: None, options.parent_pid)
    make_room(options.limits)
    # Ctrl-C reaches the terminal's whole process group; the process above stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(serve(options))
    except OSError as error:
        logger.error("%s can not be listened on: %s", options.host, error.strerror)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
