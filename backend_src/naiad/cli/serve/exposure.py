"""Who can reach the server: its addresses, the gate in front of it, and what is said of both."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping

from naiad.cli.console import say
from naiad.cli.serve.options import PORTS
from naiad.cli.serve.ports import KeptPorts
from naiad.cli.serve.side_process import SidePlan
from naiad.errors import ConfigError
from naiad.openai_server.access.policy import is_loopback

LOOPBACK = "127.0.0.1"
_EXPOSED = (
    "{host} is not a loopback address. Anyone who can reach these ports can use the server; "
    "there is no authentication."
)
_BESIDE_KEYS = " The keys of --api-keys do not protect them."
_EXPLICIT = (
    " With --model-control-mode explicit a key keeps them from running their own code here; it is sent as "
    "plain text."
)
_GATED = " The gate checks what they send (docs/security.md)."
_BUNDLED = (
    " This server is release 24.10, which has published security holes: for anything "
    "exposed use NVIDIA's current container (docs/container.md)."
)
_ACCEPTED = "--i-accept-known-holes"


def has_gate(args: argparse.Namespace, *, is_bundled: bool) -> bool:
    """Whether the gate stands in front of the server.

    Raises:
        ConfigError: options of the gate contradict each other, or the bundled server would be exposed.
    """
    is_exposed = not is_loopback(args.host)
    if args.gate == "off" and is_exposed and is_bundled and not args.i_accept_known_holes:
        raise ConfigError(
            "--gate",
            "off",
            f"on, or {_ACCEPTED} with it: {args.host} is not a loopback address, and single requests kill "
            "the bundled server (docs/security.md)",
        )
    return is_exposed if args.gate is None else bool(args.gate == "on")


def host_of_triton(host: str) -> str:
    """Return the IPv4 address of the host, for a server without the gate.

    Triton's HTTP server takes no names, and no other addresses than these. What is no host is returned as it
    is: no port can be kept there, which has its own message.

    Raises:
        ConfigError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return host
    addresses = [str(address[0]) for family, _, _, _, address in found if family == socket.AF_INET]
    if not addresses:
        expected = "an IPv4 address, or --gate on with it: Triton listens on no IPv6 address itself"
        raise ConfigError("--host", host, expected)
    return addresses[0]


def keep_server_ports(kept: KeptPorts) -> dict[str, int]:
    """Keep ports on loopback for a server behind the gate."""
    return {name: kept.keep(f"the server's port for {name}", LOOPBACK, 0) for name in PORTS}


def gate_plan(
    args: argparse.Namespace, ports: Mapping[str, int], server_ports: Mapping[str, int]
) -> SidePlan:
    """Return what the gate is started with."""
    options = [f"--host={args.host}", f"--log-format={args.log_format}"]
    for name in PORTS:
        options += [f"--{name}-port={ports[name]}", f"--server-{name}-port={server_ports[name]}"]
    options += [f"--allowed-host={name}" for name in args.gate_allowed_host]
    options += [f"--allowed-origin={origin}" for origin in args.gate_allowed_origin]
    options += ["--model-control"] if args.model_control_mode == "explicit" else []
    options.append(f"--max-body-bytes={args.gate_max_body_bytes}")
    options.append(f"--max-connections={args.gate_max_connections}")
    options.append(f"--slow-reader-s={args.slow_reader_s}")
    # Of its ports this one is opened last.
    return SidePlan(
        name="the gate", module="naiad.gate", host=args.host, port=ports["grpc"], options=tuple(options)
    )


def warn_if_exposed(args: argparse.Namespace, *, is_bundled: bool, is_gated: bool) -> None:
    """Say what an address that others can reach means."""
    if is_loopback(args.host):
        return
    say(
        _EXPOSED.format(host=args.host)
        + (_BESIDE_KEYS if args.api_keys is not None else "")
        + (_EXPLICIT if args.model_control_mode == "explicit" else "")
        + (_GATED if is_gated else "")
        + (_BUNDLED if is_bundled else ""),
        "warning",
    )
