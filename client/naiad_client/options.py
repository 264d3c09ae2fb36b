"""The options of `python -m naiad_client`."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from naiad_client.client import DEFAULT_URL


class OneLineParser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and where to look, and exit with 2."""
        print(f"error: {message} (`{self.prog} --help` lists the options)", file=sys.stderr)
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line's options."""
    parser = OneLineParser(
        prog="python -m naiad_client",
        description="Stream an answer to the terminal; at the end tokens/s (from the first token on) "
        "and the time to the first token go to stderr.",
    )
    add = parser.add_argument
    add(
        "prompt",
        nargs="?",
        help="text to continue, or with --chat the user's message; -: read it from standard input; without "
        "one --chat reads a message a line until the end of input (Ctrl-D)",
    )
    add("--chat", action="store_true", help="use the checkpoint's chat template")
    add("--system", metavar="TEXT", help="with --chat: the system message")
    add("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, metavar="T", help="0 = greedy")
    add("--top-k", type=int, metavar="K", help="keep the K best tokens")
    add("--top-p", type=float, metavar="P", help="keep the best tokens up to probability P")
    add("--min-p", type=float, metavar="P", help="keep tokens with P × the best probability")
    add("--seed", type=int, metavar="S", help="the same seed gives the same text")
    add("--stop", action="append", metavar="TEXT", help="end before TEXT; may be repeated")
    add(
        "--url",
        default=DEFAULT_URL,
        metavar="URL",
        help="HOST:PORT of gRPC, or http://HOST:PORT of HTTP (default: %(default)s)",
    )
    add("--model", default="ensemble", metavar="NAME", help="default: %(default)s")
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; exits with one line if it is wrong."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.prompt is None and not args.chat:
        parser.error("a prompt is missing: give one, or - for standard input, or --chat for a conversation")
    if args.system is not None and not args.chat:
        parser.error("--system needs --chat")
    return args
