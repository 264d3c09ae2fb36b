"""`python -m naiad_client "prompt"`: stream an answer to the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from naiad_client.client import DEFAULT_URL, Chunk, Client, Generation
from naiad_client.errors import ServerError


@dataclass(slots=True)
class Timing:
    """When tokens arrived.

    Attributes:
        start_s, first_s, last_s: times of `time.monotonic`; first_s is None before the first token.
        num_first_tokens: tokens of the first chunk that had any.
        num_tokens: all tokens.
    """

    start_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_first_tokens: int = 0
    num_tokens: int = 0

    def take(self, chunk: Chunk, now_s: float) -> None:
        """Count the tokens of a chunk that arrived at `now_s`."""
        if not chunk.num_output_tokens:
            return
        if self.first_s is None:
            self.first_s = now_s
            self.num_first_tokens = chunk.num_output_tokens
        self.last_s = now_s
        self.num_tokens += chunk.num_output_tokens

    def summary(self) -> str:
        """The number of tokens, the time to the first token, and the rate from then on, as a line of text."""
        if self.first_s is None:
            return "0 tokens"
        words = [
            f"{self.num_tokens} token" + "s" * (self.num_tokens != 1),
            f"first token after {self.first_s - self.start_s:.3f} s",
        ]
        if self.last_s > self.first_s:
            rate = (self.num_tokens - self.num_first_tokens) / (self.last_s - self.first_s)
            words.insert(1, f"{rate:.1f} tokens/s")
        return ", ".join(words)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m naiad_client",
        description="Stream an answer to the terminal; at the end tokens/s (from the first token on) "
        "and the time to the first token go to stderr.",
    )
    parser.add_argument("prompt", help="text to continue, or with --chat the user's message")
    parser.add_argument("--chat", action="store_true", help="use the checkpoint's chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K best tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the best tokens up to probability P")
    parser.add_argument("--min-p", type=float, metavar="P", help="keep tokens with P × the best probability")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before TEXT; may be repeated")
    parser.add_argument("--url", default=DEFAULT_URL, metavar="HOST:PORT", help="default: %(default)s (gRPC)")
    parser.add_argument("--model", default="ensemble", metavar="NAME", help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 after an error of the server or without a reader; 130 after Ctrl-C.
    """
    args = build_parser().parse_args(arguments)
    timing = Timing(start_s=time.monotonic())
    try:
        with Client(args.url, model=args.model) as client, _generation(client, args) as generation:
            _print_stream(generation, timing)
    except (ServerError, ValueError) as error:
        # Start a new line if text was printed before the message.
        print(end="\n" if timing.num_tokens else "", flush=True)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; without this, Python would report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(timing.summary(), file=sys.stderr)
    return 0


def _generation(client: Client, args: argparse.Namespace) -> Generation:
    return client.generate(
        [{"role": "user", "content": args.prompt}] if args.chat else args.prompt,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop_words=args.stop,
    )


def _print_stream(chunks: Iterable[Chunk], timing: Timing) -> None:
    for chunk in chunks:
        timing.take(chunk, time.monotonic())
        print(chunk.text, end="", flush=True)
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
