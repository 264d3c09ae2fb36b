"""The options of `naiad serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from naiad.cli.argument_types import at_least, port_number, port_or_off, some_text
from naiad.cli.engine_options import MODEL_HELP, add_engine_arguments
from naiad.cli.openai_options import add_openai_arguments
from naiad.log_lines import LOG_FORMATS

OPENAI_PORT = 9000
# The value of --openai-port if it was not given.
ASKED_FOR_NONE = -1
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="read options from this TOML file, each by its name without dashes; the command line wins",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all options with their values as such a file",
    )
    _add_repository(parser)
    _add_ports(parser)
    _add_gate(parser)
    _add_openai(parser)
    _add_running(parser)
    add_engine_arguments(parser, "Each overrides the parameter of the same name in config.pbtxt.")


def _add_repository(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=some_text,
        metavar="NAME",
        help=f"{MODEL_HELP} (default: what the repository's model_dir says)",
    )
    add(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="the model repository, which is not changed (default: the one in Naiad's package)",
    )
    add(
        "--model-control-mode",
        choices=("none", "explicit"),
        default="none",
        help="explicit: clients that have the key may load and unload models, and so run their own code on "
        "this machine; the repository is served itself, not a copy (default: %(default)s)",
    )
    add(
        "--model-control-key",
        type=Path,
        metavar="FILE",
        help="with --model-control-mode explicit: the key that clients need to load and unload models; the "
        "file is made if there is none (default: a new key, which is printed once)",
    )


def _add_ports(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on, which may be one of IPv6 only with the gate (default: %(default)s)",
    )
    for name, port in PORTS.items():
        add(
            f"--{name}-port",
            type=port_number,
            default=port,
            metavar="N",
            help="default: %(default)s; 0: any free port",
        )


def _add_gate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--gate",
        choices=("on", "off"),
        help="check what clients of Triton's ports send, in a process in front of a server that then listens "
        "on loopback only (default: on if --host is not a loopback address; docs/security.md)",
    )
    add(
        "--i-accept-known-holes",
        action="store_true",
        help="allow --gate off for the bundled server on a --host that others can reach: single requests "
        "kill it, and its published holes are open",
    )
    add(
        "--gate-allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name under which clients reach the gate over HTTP, besides addresses and localhost; may "
        "be repeated",
    )
    add(
        "--gate-allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin, such as https://chat.example.com, whose pages' requests the gate lets through; may "
        "be repeated",
    )
    add(
        "--gate-max-body-bytes",
        type=at_least(1024),
        default=4 << 20,
        metavar="N",
        help="largest body of an HTTP request and largest gRPC message (default: %(default)s)",
    )
    add(
        "--gate-max-connections",
        type=at_least(1),
        default=1024,
        metavar="N",
        help="HTTP connections, and gRPC calls, at the same time (default: %(default)s)",
    )


def _add_openai(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--openai-port",
        type=port_or_off,
        default=ASKED_FOR_NONE,
        metavar="N",
        help=f"port of the OpenAI API (default: {OPENAI_PORT}, or a free one if that is taken); 0: any free "
        "port; off: no OpenAI API",
    )
    add(
        "--openai-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the OpenAI API (default: %(default)s)",
    )
    add_openai_arguments(parser, "openai-")
    add(
        "--expose-triton",
        action="store_true",
        help="with --api-keys: allow a --host that others can reach, although keys do not protect its ports",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tritonserver",
        type=Path,
        metavar="PATH",
        help="a server that is already installed, as in NVIDIA's container "
        "(default: the one of the package nvidia-pytriton)",
    )
    add(
        "--start-timeout-s",
        type=at_least(1),
        default=600,
        metavar="N",
        help="seconds without progress after which a start is given up (default: %(default)s)",
    )
    add(
        "--shutdown-delay-s",
        type=at_least(0),
        default=0,
        metavar="N",
        help="seconds that requests are still taken after Ctrl-C or SIGTERM, while the OpenAI port's /health "
        "is 503, so that load balancers notice first (default: %(default)s)",
    )
    add(
        "--exit-timeout-s",
        type=at_least(0),
        default=30,
        metavar="N",
        help="seconds that running requests get to finish on Ctrl-C or SIGTERM (default: %(default)s)",
    )
    add(
        "--slow-reader-s",
        type=at_least(1),
        default=60,
        metavar="N",
        help="seconds after which the gate and the OpenAI API end a request whose client reads next to "
        "nothing of its answer (default: %(default)s)",
    )
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="append a line of JSON for each request to this file, which only you may read: parameters, "
        "seed, time, hashes of prompt and output; `naiad replay` plays it (default: no record)",
    )
    add("--record-prompts", action="store_true", help="with --record: also the tokens of prompts and outputs")
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="the OTLP/HTTP address of a collector, such as http://localhost:4318, which gets the spans of "
        "requests, and Triton's of those that belong to a trace (default: requests are not traced)",
    )
    add("--log-verbose", type=at_least(0), default=0, metavar="N", help="the server's log level (default: 0)")
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default=LOG_FORMATS[0],
        help="how lines are written to stderr; json: each as an object with time, level, source and message "
        "(default: %(default)s)",
    )
