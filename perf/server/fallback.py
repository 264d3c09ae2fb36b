"""Measures what a fallback model is worth under overload: who answers, how soon, and who is refused.

    python -m perf.server.fallback

One server has two models, whose queues are short. Chats for the first arrive at random: at half the rate that
it can take, at three times that rate, and at half of it again. A second server does the same with
`--openai-fallback`. The metric that counts fallbacks must say what the answers said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from perf.common.percentile import percentile
from perf.common.report import print_rows, write_report
from perf.server.serve_process import Served, naiad_serve

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.main import main as naiad
from naiad.errors import InternalError

FIRST, SECOND = "first", "second"
_LOADS = (0.5, 3.0, 0.5)
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Said:
    """How a chat ended.

    Attributes:
        status: of HTTP.
        model: who answered; empty: nobody.
        first_s: from when it was due to the first token.
        end_s: from when it was due to the end.
    """

    status: int
    model: str
    first_s: float
    end_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the results."""
    args = _parse(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        repository = Path(folder) / "repository"
        limits = ("--max-num-seqs", str(args.max_num_seqs), "--max-queued-requests", str(args.max_queued))
        write_repository(repository, resolve_model(args.model), limits)
        for fallback in ((), ("--openai-fallback", f"{FIRST}={SECOND}")):
            options = ("--model-repository", str(repository), *fallback)
            with naiad_serve(options) as server:
                rate = rows[0]["most requests/s"] if rows else asyncio.run(_most_per_s(server, args))
                rows += [_row(server, load, rate, args) | {"fallback": bool(fallback)} for load in _LOADS]
    print_rows(rows)
    print("written:", write_report("fallback", vars(args), rows))
    return 0


def write_repository(path: Path, model_dir: Path, limits: Sequence[str]) -> None:
    """Write a repository of two models of one checkpoint; the second one is quantized.

    Args:
        path: the new directory.
        model_dir: the checkpoint.
        limits: options of both models.
    """
    shared = ("--model", str(model_dir), *limits, "--kv-cache-bytes", "256000000", str(path))
    naiad(["repository", "create", "--name", FIRST, *shared])
    naiad(["repository", "add", "--name", SECOND, "--quantization", "int8", *shared])


async def _most_per_s(server: Served, args: argparse.Namespace) -> float:
    """Chats a second that the first model ends while others wait."""
    async with _session() as session:
        await asyncio.gather(*(_chat(session, server, "warm up", args.output_tokens) for _ in range(4)))
        num_chats: int = args.max_num_seqs + args.max_queued
        began_s = time.perf_counter()
        prompts = (f"most {number}" for number in range(num_chats))
        said = await asyncio.gather(*(_chat(session, server, each, args.output_tokens) for each in prompts))
        if any(each.status != 200 for each in said):
            raise InternalError(f"of {num_chats} chats at once some failed: {said}")
        return num_chats / (time.perf_counter() - began_s)


def _row(server: Served, load: float, most_per_s: float, args: argparse.Namespace) -> dict[str, Any]:
    before = _num_fallbacks(server)
    said = asyncio.run(_arrivals(server, load * most_per_s, args))
    answered = {name: [each for each in said if each.model == name] for name in (FIRST, SECOND)}
    served, refused = [*answered[FIRST], *answered[SECOND]], [each for each in said if each.status == 503]
    if len(served) + len(refused) != len(said):
        raise InternalError(f"chats failed: {sorted({each.status for each in said})}")
    num_fallbacks = _num_fallbacks(server) - before
    # One that both models refuse was passed on too.
    if not len(answered[SECOND]) <= num_fallbacks <= len(answered[SECOND]) + len(refused):
        raise InternalError(f"{len(answered[SECOND])} answers of {SECOND}, but {num_fallbacks} were counted")
    first_s = [each.first_s for each in served]
    return {
        "load": load,
        "most requests/s": round(most_per_s, 2),
        "sent": len(said),
        "by first": len(answered[FIRST]),
        "by second": len(answered[SECOND]),
        "refused": len(refused),
        "counted": num_fallbacks,
        "TTFT p50 ms": round(1e3 * percentile(first_s, 50)),
        "TTFT p99 ms": round(1e3 * percentile(first_s, 99)),
        "refusal p99 ms": round(1e3 * percentile([each.end_s for each in refused] or [math.nan], 99), 1),
    }


async def _arrivals(server: Served, per_s: float, args: argparse.Namespace) -> list[Said]:
    draw, due_s = random.Random(f"{per_s}"), 0.0
    chats: list[asyncio.Task[Said]] = []
    async with _session() as session:
        began_s = time.perf_counter()
        while (due_s := due_s + draw.expovariate(per_s)) < args.duration_s:
            await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            prompt = " ".join(f"{draw.randrange(1000)}" for _ in range(args.prompt_words))
            chats.append(asyncio.create_task(_chat(session, server, prompt, args.output_tokens)))
        return list(await asyncio.gather(*chats))


async def _chat(session: aiohttp.ClientSession, server: Served, prompt: str, num_tokens: int) -> Said:
    body = {
        "model": FIRST,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    began_s, first_s, model = time.perf_counter(), math.nan, ""
    async with session.post(f"http://{server.openai}/v1/chat/completions", json=body) as answer:
        async for line in answer.content:
            if answer.status == 200 and line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise InternalError(f"a stream broke off: {event['error']}")
                if not model and event["choices"][0]["delta"].get("content"):
                    model, first_s = event["model"], time.perf_counter() - began_s
        return Said(answer.status, model, first_s, time.perf_counter() - began_s)


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(_PATIENCE_S))


def _num_fallbacks(server: Served) -> int:
    with urllib.request.urlopen(f"http://{server.openai}/metrics", timeout=_PATIENCE_S) as answer:
        page = answer.read().decode()
    return sum(
        int(float(found)) for found in re.findall(r"^naiad_openai_fallbacks_total\{.*\} (\S+)$", page, re.M)
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]; the second is it with int8")
    add("--max-num-seqs", type=at_least(1), default=8, metavar="N", help="of each model")
    add("--max-queued", type=at_least(1), default=8, metavar="N", help="--max-queued-requests of each model")
    add("--prompt-words", type=at_least(1), default=30, metavar="N", help="numbers in a prompt")
    add("--output-tokens", type=at_least(1), default=48, metavar="N", help="of each answer")
    add(
        "--duration-s",
        type=float,
        default=20.0,
        metavar="S",
        help="time over which chats arrive at each load",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
