"""Measures the benefit of coalescing late tokens, with an engine faster than the server, through `ensemble`.

    python -m perf.server.coalescing

There are two servers with the real models and an engine process that only counts. In one of them late
tokens share a response, as in service; in the other each token has its own. They take turns, A B A B.
Every text is checked. With more tokens or on a busy machine, the second server's detokenizer may not
answer for a minute: then `naiad serve` restarts it, and the measurement ends with an error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from perf.common.report import print_rows, write_report
from perf.common.word_prompts import single_token_words, word_prompts
from perf.server.fast_repository import write_fast_repository
from perf.server.load import all_at_once, responses, text_inputs
from perf.server.serve_process import naiad_serve
from transformers import AutoTokenizer

from naiad.cli.bench.throughput import Work
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.errors import InternalError

ASKED_RATIO = 3.0


def main() -> int:
    """Measure, print and write the results; return 1 if a request failed or a text was wrong."""
    args = _parse()
    try:
        turns = _turns(args)
    except InternalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = [{"late tokens": name, **_medians(figures)} for name, figures in turns.items()]
    print_rows(results)
    pairs = zip(*turns.values(), strict=True)
    ratio = statistics.median(a["tokens/s"] / b["tokens/s"] for a, b in pairs)
    print(f"coalescing is {ratio:.2f} times as fast as one response per token (target: {ASKED_RATIO:g})")
    results.append({"ratio": round(ratio, 3), "asked": ASKED_RATIO})
    print("written:", write_report("coalescing", vars(args), results))
    return 0


def _turns(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each turn for both servers."""
    model_dir = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    work = Work(args.concurrency, 16, args.output_tokens)
    words = single_token_words(tokenizer)
    with (
        tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder,
        naiad_serve(*_serve_options(Path(folder), model_dir, args, coalesces=True)) as together,
        naiad_serve(*_serve_options(Path(folder), model_dir, args, coalesces=False)) as apart,
    ):
        turns: dict[str, list[dict[str, float]]] = {"together": [], "one response a token": []}
        for turn in range(args.repeats + 1):
            texts = [tokenizer.decode(ids) for ids in word_prompts(work, [], words, turn)]
            for name, server in zip(turns, (together, apart), strict=True):
                # The first turn warms up.
                num_tokens = args.output_tokens if turn else 32
                figures = measure(server.grpc, texts, num_tokens)
                turns[name] += [figures] if turn else []
    return turns


def measure(url: str, prompts: list[str], num_tokens: int) -> dict[str, float]:
    """Send all prompts at once.

    Args:
        url: HOST:PORT of the server's gRPC endpoint.
        prompts: prompts of words that are one token each, with a space before each word.
        num_tokens: number of new tokens for each.

    Raises:
        InternalError: a text is not what the engine generated.
    """
    start_s = time.perf_counter()
    streams = all_at_once(url, [partial(_stream, prompt=each, num_tokens=num_tokens) for each in prompts])
    seconds = time.perf_counter() - start_s
    total = num_tokens * len(prompts)
    return {
        "tokens/s": round(total / seconds, 1),
        "responses per 1,000 tokens": round(1000 * sum(streams) / total, 1),
    }


async def _stream(client: Any, prompt: str, num_tokens: int) -> int:
    """Stream one answer and return the number of its responses."""
    parts: list[str] = []
    async for result in responses(client, "ensemble", text_inputs(prompt, num_tokens)):
        parts.append(result.as_numpy("text_output").item().decode())
    words = prompt.split(" ")[1:]
    expected = "".join(f" {words[number % len(words)]}" for number in range(num_tokens))
    if "".join(parts) != expected:
        raise InternalError("a stream's text is not what the engine generated")
    return len(parts)


def _serve_options(
    folder: Path, model_dir: Path, args: argparse.Namespace, *, coalesces: bool
) -> tuple[list[str], dict[str, str]]:
    """Return options and environment for a server with the fast engine in its own repository."""
    repository = folder / f"coalesces-{coalesces}"
    environment = write_fast_repository(repository, args.tokens_per_s, coalesces=coalesces)
    return ["--model", str(model_dir), "--model-repository", str(repository)], environment


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--tokens-per-s", type=float, default=20_000, metavar="N", help="of the engine")
    parser.add_argument("--concurrency", type=int, default=32, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=250, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
