"""Measures the OpenAI API beside the model `text` over gRPC and HTTP, on one server, in turns.

    python -m perf.server.openai --streams 1,8,32,128

All contestants stream greedy answers to the same prompts, and their texts must be equal, or no speed is
reported. Then streams are measured while another client sends large bodies, and a thousand streams that are
silent are held open. Where `make bench-peers` has installed vLLM, its own load generator `vllm bench serve`
measures this server and vLLM's. Last the CPU time per token is measured behind an engine that only counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from perf.common.percentile import percentile
from perf.common.report import print_rows, write_report
from perf.common.word_prompts import single_token_words, word_prompts
from perf.server import processor_time, vllm_serving
from perf.server.fast_repository import write_fast_repository
from perf.server.load import arrays, openai_body, openai_model, text_inputs, timed_messages
from perf.server.serve_process import Served, naiad_serve
from perf.server.sse_load import timed_event_streams
from transformers import AutoTokenizer

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import Work
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config.cores import num_compute_threads

_LARGE_BODY_BYTES = 1_000_000
_IDLE_TOKENS_PER_S = 20.0
_NUM_LISTS = 200

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stream:
    """What came on a stream: pieces of text, each with its time in seconds since all streams began."""

    pieces: list[tuple[float, str]]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(piece for _, piece in self.pieces)

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces."""
        return [after - before for (before, _), (after, _) in pairwise(self.pieces)]


Contestant = Callable[[Sequence[str], int], list[Stream]]


def main() -> int:
    """Measure, print and write; return 1 if the contestants' texts differ."""
    args = _parse()
    model_dir = resolve_model(args.model)
    batches = [int(part) for part in args.streams.split(",")]
    options = [
        *("--model", str(model_dir), "--max-num-seqs", str(max(batches))),
        *("--enable-prefix-caching", "false", "--drafter", "none"),
    ]
    with naiad_serve(options) as server:
        rows = _in_turns(server, model_dir, batches, args)
        if rows is None:
            return 1
        print_rows(rows)
        beside = large_bodies(partial(_openai, server, openai_model(server)), server, args)
        print_rows(beside)
        benched = _benched("openai", server.openai, openai_model(server), model_dir, batches, args)
    benched += _benched_vllm(model_dir, batches, args)
    if benched:
        print_rows(benched)
    idle = idle_streams(str(model_dir), args.idle_streams)
    print_rows([idle])
    settings = vars(args) | {"model": model_dir.name, "large_bodies": beside, "idle": idle, "bench": benched}
    print("written:", write_report("openai", settings, rows))
    return 0 if args.without_processor_time else processor_time.main(["--model", str(model_dir)])


def _in_turns(
    server: Served, model_dir: Path, batches: Sequence[int], args: argparse.Namespace
) -> list[Row] | None:
    """A row for each number of streams and contestant; None if their texts differ."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    contestants: dict[str, Contestant] = {
        "text, gRPC": partial(_text_grpc, server),
        "text, HTTP": partial(_text_http, server),
        "openai": partial(_openai, server, openai_model(server)),
    }
    rows: list[Row] = []
    for batch in batches:
        work = Work(batch, args.prompt_tokens, args.output_tokens)
        make = partial(word_prompts, work, tokenizer.encode(""), single_token_words(tokenizer))
        turns = take_turns(contestants, lambda seed: [tokenizer.decode(ids) for ids in make(seed)], args)  # noqa: B023
        if turns is None:
            return None
        rows += [row_of(name, batch, args.output_tokens, streams) for name, streams in turns.items()]
    return rows


def _benched(
    name: str, address: str, model: str, model_dir: Path, batches: Sequence[int], args: argparse.Namespace
) -> list[Row]:
    """What `vllm bench serve` measures of a server, for each number of streams; nothing without it."""
    if not _has_vllm(args):
        return []
    sizes = {"prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    loads = [vllm_serving.BenchLoad(streams=each, repeats=args.repeats, **sizes) for each in batches]
    return [{"through": name, **vllm_serving.bench(address, model, model_dir, load)} for load in loads]


def _benched_vllm(model_dir: Path, batches: Sequence[int], args: argparse.Namespace) -> list[Row]:
    """The same of vLLM's server, which does not run beside Naiad's."""
    if not _has_vllm(args):
        print("not beside vLLM: `make bench-peers` has not installed it, or --without-vllm was given")
        return []
    window = 2 * (args.prompt_tokens + args.output_tokens)
    with vllm_serving.vllm_serve(model_dir, num_compute_threads(), max(batches), window) as address:
        return _benched("vLLM", address, model_dir.name, model_dir, batches, args)


def _has_vllm(args: argparse.Namespace) -> bool:
    return vllm_serving.is_installed() and not args.without_vllm


def take_turns(
    contestants: dict[str, Contestant], make_prompts: Callable[[int], list[str]], args: argparse.Namespace
) -> dict[str, list[list[Stream]]] | None:
    """The streams of each contestant in each repeat; None if their texts differ."""
    turns: dict[str, list[list[Stream]]] = {name: [] for name in contestants}
    for repeat in range(-1, args.repeats):
        prompts = make_prompts(repeat)
        texts = set()
        for name, ask in contestants.items():
            streams = ask(prompts, args.output_tokens)
            texts.add(tuple(stream.text for stream in streams))
            if repeat >= 0:
                turns[name].append(streams)
        if len(texts) > 1:
            print("the contestants' texts differ: no speed is reported", file=sys.stderr)
            return None
    return turns


def row_of(name: str, batch: int, num_tokens: int, turns: Sequence[Sequence[Stream]]) -> Row:
    """Medians over the repeats; times in milliseconds."""
    return {
        "through": name,
        "streams": batch,
        "tokens/s": round(statistics.median(batch * num_tokens / _end_s(turn) for turn in turns), 1),
        **_medians("TTFT", [[stream.pieces[0][0] for stream in turn] for turn in turns], (50, 95)),
        **_medians(
            "gap", [[gap for stream in turn for gap in stream.gaps_s] for turn in turns], (50, 95, 99)
        ),
    }


def _end_s(streams: Sequence[Stream]) -> float:
    return max(stream.pieces[-1][0] for stream in streams)


def _medians(name: str, turns: Sequence[Sequence[float]], percents: Sequence[int]) -> Row:
    return {
        f"{name} p{each}": round(1e3 * statistics.median(percentile(turn, each) for turn in turns), 2)
        for each in percents
    }


def _text_grpc(server: Served, prompts: Sequence[str], num_tokens: int) -> list[Stream]:
    asked = [text_inputs(prompt, num_tokens) for prompt in prompts]
    return [
        Stream(
            [
                (time_s, value.decode())
                for time_s, message in stream
                for array in arrays([message], "text_output")
                for value in array.tolist()
            ]
        )
        for stream in timed_messages(server.grpc, "text", asked)
    ]


def _text_http(server: Served, prompts: Sequence[str], num_tokens: int) -> list[Stream]:
    bodies = [
        {"text_input": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
        for prompt in prompts
    ]
    streams = timed_event_streams(server.http, "/v2/models/text/generate_stream", bodies)
    return [
        Stream([(time_s, str(event["text_output"])) for time_s, event in stream if "text_output" in event])
        for stream in streams
    ]


def _openai(server: Served, model: str, prompts: Sequence[str], num_tokens: int) -> list[Stream]:
    bodies = [openai_body(model, prompt, num_tokens) for prompt in prompts]
    return [
        Stream([(time_s, choice["text"]) for time_s, event in stream for choice in event["choices"]])
        for stream in timed_event_streams(server.openai, "/v1/completions", bodies)
    ]


def large_bodies(ask: Contestant, server: Served, args: argparse.Namespace) -> list[Row]:
    """Gaps of streams alone, and while another client sends one large body after the other."""
    prompts = ["Once upon a time", "The capital of France", "A list of words:", "In the beginning"] * 2
    quiet, loud = [], []
    for _ in range(args.repeats):
        quiet.append(ask(prompts, args.output_tokens))
        with _large_bodies_sent(server):
            loud.append(ask(prompts, args.output_tokens))
    return [
        row_of(name, len(prompts), args.output_tokens, turns)
        for name, turns in (("openai, alone", quiet), ("openai, beside large bodies", loud))
    ]


@contextmanager
def _large_bodies_sent(server: Served) -> Iterator[None]:
    body = {"model": openai_model(server), "prompt": "word " * (_LARGE_BODY_BYTES // 5), "max_tokens": 1}
    request = urllib.request.Request(
        f"http://{server.openai}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    stopped = threading.Event()

    def send() -> None:
        while not stopped.is_set():
            try:
                urllib.request.urlopen(request, timeout=60).close()
            except urllib.error.HTTPError as error:
                # Its prompt is longer than the window.
                if error.code != 400:
                    raise

    thread = threading.Thread(target=send)
    thread.start()
    yield
    stopped.set()
    thread.join()


def idle_streams(model_dir: str, num_streams: int) -> Row:
    """Hold streams open that are silent for long; say what they cost, and how fast the server answers others.

    The engine only counts, and gives each stream a token every `num_streams / _IDLE_TOKENS_PER_S` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        repository = Path(folder) / "repository"
        environment = write_fast_repository(repository, _IDLE_TOKENS_PER_S)
        options = [
            *("--model", model_dir, "--model-repository", str(repository)),
            *("--max-num-seqs", str(num_streams), "--max-queued-requests", str(num_streams)),
        ]
        with naiad_serve(options, environment) as server:
            model, process = openai_model(server), _openai_process()
            alone_bytes = process.memory_info().rss
            ended = threading.Thread(target=_openai, args=(server, model, ["Hello"] * num_streams, 2))
            ended.start()
            time.sleep(num_streams / _IDLE_TOKENS_PER_S / 2)
            before_s, began_s = sum(process.cpu_times()[:2]), time.perf_counter()
            lists_s = [_timed_list(server) for _ in range(_NUM_LISTS)]
            spent_s = sum(process.cpu_times()[:2]) - before_s
            row = {
                "idle streams": num_streams,
                "KiB a stream": round((process.memory_info().rss - alone_bytes) / 1024 / num_streams, 1),
                "list of models p50": round(1e3 * percentile(lists_s, 50), 2),
                "p99": round(1e3 * percentile(lists_s, 99), 2),
                "CPU, ms a second": round(1e3 * spent_s / (time.perf_counter() - began_s), 1),
            }
            ended.join()
            return row


def _timed_list(server: Served) -> float:
    time.sleep(0.05)
    began_s = time.perf_counter()
    openai_model(server)
    return time.perf_counter() - began_s


def _openai_process() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    return next(each for each in children if "naiad.openai_server" in each.cmdline())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--streams", default="1,8,32,128", metavar="N,…", help="streams at once")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=64, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=64, metavar="N")
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N", help="turns of each")
    parser.add_argument("--idle-streams", type=at_least(1), default=1000, metavar="N")
    parser.add_argument("--without-vllm", action="store_true", help="do not measure beside vLLM's server")
    parser.add_argument(
        "--without-processor-time", action="store_true", help="do not end with perf.server.processor_time"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
