"""`naiad key`: makes a key for the OpenAI API, and its entry for the file of `naiad serve --api-keys`."""

from __future__ import annotations

import argparse

import msgspec

from naiad.cli.console import say
from naiad.openai_server.access.key_file import new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("name", metavar="NAME", help="names the key in messages")
    add("--tenant", metavar="T", help="whose requests it sends (default: NAME)")
    add(
        "--role",
        choices=("user", "operator"),
        default="user",
        help="operators may read the metrics, /health/deep and what the engine view shows of others "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a new key to stderr, once, and its entry to stdout.

    Raises:
        StartupError: the name or the tenant is not allowed.
    """
    secret, entry = new_key(args.name, args.name if args.tenant is None else args.tenant, args.role)
    say(f"the key, which is shown only now: {secret}")
    print(msgspec.json.format(msgspec.json.encode(entry), indent=2).decode())
    return 0
