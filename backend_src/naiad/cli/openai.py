"""`naiad openai`: the OpenAI API in front of a Triton server that runs elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from naiad.cli.argument_types import at_least, port_number
from naiad.cli.console import write
from naiad.cli.control_key import grpc_metadata, read_control_key
from naiad.cli.openai_options import add_openai_arguments
from naiad.errors import ConfigError, StartupError
from naiad.log_lines import LOG_FORMATS
from naiad.openai_server.access.policy import is_loopback
from naiad.openai_server.api.parsing.families import FamilyChoices
from naiad.openai_server.fallbacks import Fallbacks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--url", required=True, metavar="HOST:PORT", help="the Triton server's gRPC port")
    add(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="DIR",
        help="the served checkpoint's tokenizer files and config.json; no weights are needed",
    )
    add(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="offer this model of the Triton server; may be repeated (default: all that take text)",
    )
    add(
        "--served-name",
        metavar="NAME",
        help="the name for clients of the one --model (default: its name at the Triton server)",
    )
    add(
        "--metrics-url",
        metavar="URL",
        help="the page of the Triton server's metrics, such as http://localhost:8002/metrics; /metrics shows "
        "what it says of Naiad's models",
    )
    add(
        "--model-control-key",
        type=Path,
        metavar="FILE",
        help="the key of a Triton server that was started with `naiad serve --model-control-mode explicit`, "
        "which lists its models only with it",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=port_number,
        default=9000,
        metavar="N",
        help="port to listen on (default: %(default)s); 0: any free port",
    )
    add_openai_arguments(parser)
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="the OTLP/HTTP address of a collector, such as http://localhost:4318, which gets the spans of "
        "requests (default: requests are not traced)",
    )
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default=LOG_FORMATS[0],
        help="how lines are written to stderr (default: %(default)s)",
    )
    add(
        "--exit-timeout-s",
        type=at_least(0),
        default=30,
        metavar="N",
        help="seconds that running requests get to finish on Ctrl-C or SIGTERM (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        StartupError: an option is wrong, or the address cannot be listened on.
    """
    _check(args)
    fallbacks = _fallbacks(args)
    # Imported after the checks because gRPC and the tokenizers take a while to import.
    from naiad.openai_server.access.gate import Gate
    from naiad.openai_server.app import ServerOptions
    from naiad.openai_server.engines.remote.models import RemoteServer
    from naiad.openai_server.serving import serve, write_log
    from naiad.tracing.exporter import Collector

    gate = None if args.api_keys is None else Gate(args.api_keys, metrics_open=args.metrics_open)
    endpoint = args.otlp_endpoint
    collector = None if endpoint is None else Collector.parse("--otlp-endpoint", endpoint)
    families = FamilyChoices(args.reasoning, args.tool_parser)
    key = None if args.model_control_key is None else read_control_key(args.model_control_key)
    remote = RemoteServer.open(
        args.url,
        args.tokenizer,
        families,
        tuple(args.model),
        args.served_name,
        control_headers=dict(grpc_metadata(key)),
    )
    options = ServerOptions(
        remote=remote,
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allowed_origin),
        is_lenient=args.lenient,
        metrics_url=args.metrics_url,
        families=families,
        header_timeout_s=args.header_timeout_s,
        fallbacks=fallbacks,
        collector=collector,
    )
    write_log(args.log_format)
    try:
        asyncio.run(
            serve(
                options,
                gate,
                args.host,
                args.port,
                stop_signals=(signal.SIGINT, signal.SIGTERM),
                shutdown_s=args.exit_timeout_s,
                listens=lambda port: _announce(args, port),
            )
        )
    except OSError as error:
        raise StartupError(f"{args.host}:{args.port} can not be listened on: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError("--host", args.host, "an address of this machine, such as 127.0.0.1") from None
    return 0


def _check(args: argparse.Namespace) -> None:
    host, _, port = args.url.rpartition(":")
    if not host or "/" in args.url or not port.isdigit():
        raise ConfigError("--url", args.url, "HOST:PORT of the Triton server's gRPC port")
    if args.served_name is not None and len(args.model) != 1:
        raise ConfigError("--served-name", args.served_name, "one --model with it")
    if args.metrics_open and args.api_keys is None:
        raise ConfigError("--metrics-open", True, "--api-keys FILE with it")
    if args.api_keys is None and not is_loopback(args.host):
        raise ConfigError("--host", args.host, "a loopback address, or --api-keys FILE")


def _fallbacks(args: argparse.Namespace) -> Fallbacks:
    """Read --fallback; with --model there can be no other models than those.

    Raises:
        ConfigError: it is malformed, or names another model.
    """
    fallbacks = Fallbacks.parse("--fallback", args.fallback)
    if args.model:
        fallbacks.refuse_unknown("--fallback", args.model if args.served_name is None else [args.served_name])
    return fallbacks


def _announce(args: argparse.Namespace, port: int) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    write(f"naiad: ready: openai=http://{host}:{port}/v1 in front of {args.url}\n", sys.stdout)
    if sys.stdout.isatty():
        write(f"  open http://{host}:{port}/ in a browser\n", sys.stdout)
