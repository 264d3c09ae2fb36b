"""`python -m naiad_client "prompt"`: stream an answer to the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TextIO

from naiad_client.client import Client
from naiad_client.errors import ServerError
from naiad_client.options import parse
from naiad_client.timing import Timing
from naiad_client.wire import Message

_SIGN = "> "
# Stands for a control character; every terminal has it.
_CONTROL = "?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 after an error of the server or without a reader; 130 after Ctrl-C.
    """
    args = parse(None if arguments is None else list(arguments))
    try:
        if sys.stdin is None and args.prompt in (None, "-"):
            raise ValueError("there is no standard input to read")
        with Client(args.url, model=args.model) as client:
            if args.prompt is None:
                return _converse(client, args)
            prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
            _answer(client, args, [*_system(args), _message("user", prompt)] if args.chat else prompt)
    except (ServerError, ValueError) as error:
        print(f"error: {_shown(str(error), sys.stderr)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Without this, Python would report the output again at exit.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # If its reader is gone, nobody wants to know.
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _converse(client: Client, args: argparse.Namespace) -> int:
    """Answer each line of standard input with what was said before; return the exit code."""
    messages, num_errors = _system(args), 0
    for line in _lines():
        messages.append(_message("user", line))
        try:
            messages.append(_message("assistant", _answer(client, args, messages)))
        except ServerError as error:
            print(f"error: {_shown(str(error), sys.stderr)}", file=sys.stderr)
            messages.pop()
            num_errors += 1
    return 1 if num_errors else 0


def _lines() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print(_SIGN, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _answer(client: Client, args: argparse.Namespace, prompt: str | Sequence[Message]) -> str:
    """Stream an answer to the terminal, then its figures; return it."""
    timing, texts = Timing(start_s=time.monotonic()), []
    generation = client.generate(
        prompt,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop_words=args.stop,
    )
    try:
        with generation:
            for chunk in generation:
                timing.take(chunk, time.monotonic())
                texts.append(chunk.text)
                print(_shown(chunk.text, sys.stdout), end="", flush=True)
    except ServerError:
        # Start a new line if text was printed before the message.
        print(end="\n" if timing.num_tokens else "", flush=True)
        raise
    print(flush=True)
    print(timing.summary(), file=sys.stderr)
    return "".join(texts)


def _shown(text: str, file: TextIO | None) -> str:
    """A text without the control characters that a terminal obeys, if it goes to one."""
    if file is None or not file.isatty():
        return text
    return "".join(
        each if each in "\n\t" or unicodedata.category(each) != "Cc" else _CONTROL
        for each in text.replace("\r\n", "\n")
    )


def _system(args: argparse.Namespace) -> list[Message]:
    return [] if args.system is None else [_message("system", args.system)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


if __name__ == "__main__":
    sys.exit(main())
