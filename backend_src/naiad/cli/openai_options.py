"""The OpenAI API's settings as options of `naiad serve` and `naiad openai`."""

from __future__ import annotations

import argparse
from pathlib import Path

from naiad.cli.argument_types import at_least
from naiad.openai_server.api.parsing.families import CALL_CHOICES, REASONING_CHOICES


def add_openai_arguments(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Declare an option for each setting of the API except its address.

    Args:
        parser: gets the options.
        prefix: what their names begin with where the command has settings of other servers too.
    """
    add = parser.add_argument
    add(
        f"--{prefix}allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name under which clients reach the OpenAI API, besides addresses and localhost; may be "
        "repeated",
    )
    add(
        f"--{prefix}allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin, such as https://chat.example.com, whose pages may call the OpenAI API; may be "
        "repeated",
    )
    add(
        f"--{prefix}header-timeout-s",
        type=at_least(1),
        default=30,
        metavar="N",
        help="the OpenAI API closes a connection that has not sent the headers of a request after so many "
        "seconds (default: %(default)s)",
    )
    add(
        f"--{prefix}lenient",
        action="store_true",
        help="the OpenAI API passes over unknown fields of requests instead of refusing them",
    )
    add(
        f"--{prefix}fallback",
        action="append",
        default=[],
        metavar="MODEL=OTHER",
        help="the model OTHER answers the OpenAI API's requests for MODEL while MODEL cannot: its queue is "
        "full, the first token would be late, or its engine is away; may be repeated",
    )
    _add_keys(parser)
    _add_families(parser, prefix)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="the keys of the OpenAI API, one of which a request then needs; read again on SIGHUP, which "
        "then does not stop the server (`naiad key` makes a key)",
    )
    add("--metrics-open", action="store_true", help="with --api-keys: the OpenAI API's /metrics needs no key")


def _add_families(parser: argparse.ArgumentParser, prefix: str) -> None:
    add = parser.add_argument
    add(
        f"--{prefix}reasoning",
        choices=REASONING_CHOICES,
        default="auto",
        help="how models write what they reason before they answer; auto: as the checkpoint's chat template "
        "or tokens say (default: %(default)s)",
    )
    add(
        # Refusals of requests name it with the prefix, whichever command serves them.
        *dict.fromkeys((f"--{prefix}tool-parser", "--openai-tool-parser")),
        choices=CALL_CHOICES,
        default="auto",
        help="how models write calls of tools; auto: as the checkpoint's chat template says; none: tools are "
        "refused (default: %(default)s)",
    )
