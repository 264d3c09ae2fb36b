"""Measures the CPU time per token of the server's processes, with an engine that only counts or a real one.

    python -m perf.server.processor_time
    python -m perf.server.processor_time --gate on --engine computing

The real server with the real models streams each token of an engine that computes nothing, at a rate
that all models sustain. The models and the OpenAI API take turns; then the server is idle for a while.
With `--engine computing` the engine computes the model, as fast as it can; its time is among "others".
With `--gate on` Triton's clients come through the gate; the last column is its share of the other processes.
With `--bare-chain` an ensemble of two Python models that do nothing but stream takes turns too: what Triton
itself takes for a token that passes two models.
CPU time is more reliable than speed on a machine with other load. Beside an engine that only counts it does
not include the effect that a real engine competes with these processes for the same cores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from perf.common.report import ROOT, print_rows, write_report
from perf.common.word_prompts import single_token_words, word_prompts
from perf.server.bare_chain import CHAIN, bare_generate, write_bare_chain
from perf.server.fast_repository import write_fast_repository
from perf.server.load import PROTOCOLS, CountedTokens, llm_generate, openai_generate, text_generate
from perf.server.serve_process import naiad_serve
from transformers import AutoTokenizer

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import Work
from naiad.cli.checkpoints.fetch import resolve_model

REST = "at rest, a second"
LOAD, OTHERS, OPENAI, GATE = "load generator", "others", "openai", "gate"
COUNTING, COMPUTING = "counting", "computing"
_STUB = re.compile(r"triton_python_backend_stub .*/(\w+)/\d+/model\.py")
_BARE = ("bare_llm", "bare_detokenizer")
_COLUMNS = ("tritonserver", "llm", "tokenizer", "detokenizer", "text", OPENAI, OTHERS, GATE, *_BARE)

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the results."""
    args = _parse(argv)
    model_dir = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    num_tokens = round(args.tokens_per_s * args.seconds / args.concurrency)
    work = Work(args.concurrency, 16, num_tokens)
    make_prompts = partial(word_prompts, work, tokenizer.encode(""), single_token_words(tokenizer))
    turns = []
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        repository = Path(folder) / "repository"
        environment = write_repository(repository, None if args.engine == COMPUTING else args.tokens_per_s)
        if args.bare_chain:
            write_bare_chain(repository, args.tokens_per_s / args.concurrency)
        options = ["--model", str(model_dir), "--model-repository", str(repository), "--gate", args.gate]
        with naiad_serve(options, environment) as server:
            counted = CountedTokens(server)
            contestants: dict[str, Callable[[Any, int], object]] = {
                "ensemble": counted.of(text_generate(server, "ensemble", decode, args.protocol)),
                "text": counted.of(text_generate(server, "text", decode, args.protocol)),
                "llm": counted.of(llm_generate(server, args.protocol)),
                OPENAI: counted.of(openai_generate(server, decode)),
                **({CHAIN: bare_generate(server, args.protocol)} if args.bare_chain else {}),
                REST: lambda _prompts, _num_tokens: time.sleep(args.seconds),
            }
            for generate in contestants.values():
                generate(make_prompts("warm up"), 8)
            for turn in range(args.repeats):
                for name, generate in contestants.items():
                    prompts = make_prompts(f"{name} {turn}")
                    before, began_s = processor_seconds(), time.perf_counter()
                    generate(prompts, num_tokens)
                    spent = {kind: now - before[kind] for kind, now in processor_seconds().items()}
                    made = args.seconds if name == REST else num_tokens * args.concurrency
                    rate = made / (time.perf_counter() - began_s)
                    turns.append(row_of(name, spent, made, rate))
                counted.check()
    rows = medians(turns)
    print("milliseconds of CPU time per token")
    print_rows(rows)
    settings = vars(args) | {"model": model_dir.name}
    print("written:", write_report("processor-time", settings, rows))
    return 0


def write_repository(path: Path, tokens_per_s: float | None) -> dict[str, str]:
    """Write the shipped models; the engine of `llm` makes so many tokens a second, or (None) computes.

    Returns:
        Variables for the server's environment.
    """
    if tokens_per_s is not None:
        return write_fast_repository(path, tokens_per_s)
    shutil.copytree(ROOT / "model_repository", path)
    return {"PYTHONPATH": str(ROOT)}


def processor_seconds(pid: int | None = None) -> dict[str, float]:
    """CPU seconds that a process, by default this one, and its descendants have used, by kind of process."""
    spent: dict[str, float] = defaultdict(float)
    first, here = psutil.Process(pid), psutil.Process()
    for process in [first, *first.children(recursive=True)]:
        try:
            kind = LOAD if process == here else kind_of(process.name(), process.cmdline())
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[kind] += float(times.user + times.system)
    return spent


def kind_of(name: str, command: Sequence[str]) -> str:
    """The kind of a process: a stub's model, "tritonserver", `OPENAI`, `GATE`, or `OTHERS` (engine, …)."""
    if "naiad.openai_server" in command:
        return OPENAI
    if "naiad.gate" in command:
        return GATE
    if match := _STUB.search(" ".join(command)):
        return match[1]
    return name if name == "tritonserver" else OTHERS


def row_of(name: str, spent: Mapping[str, float], made: float, rate: float) -> Row:
    """Milliseconds per unit of work: per token, or per idle second."""
    shares = {kind: round(1e3 * spent.get(kind, 0.0) / made, 3) for kind in _COLUMNS}
    load = round(1e3 * spent.get(LOAD, 0.0) / made, 3)
    server = sum(shares.values())
    return {
        "through": name,
        "tokens/s": None if name == REST else round(rate, 1),
        "server": round(server, 3),
        **shares,
        LOAD: load,
        "gate of the rest": round(shares[GATE] / max(server - shares[GATE], 1e-9), 3),
    }


def medians(turns: Sequence[Row]) -> list[Row]:
    """One row of medians for each model, in the order of the turns."""
    by_name: dict[str, list[Row]] = {}
    for row in turns:
        by_name.setdefault(row["through"], []).append(row)
    return [
        {
            key: value if key == "through" or value is None else statistics.median(each[key] for each in rows)
            for key, value in rows[0].items()
        }
        for rows in by_name.values()
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--engine", default=COUNTING, choices=(COUNTING, COMPUTING), help="of the model llm")
    parser.add_argument(
        "--tokens-per-s", type=float, default=400, metavar="N", help="of an engine that only counts"
    )
    parser.add_argument("--concurrency", type=at_least(1), default=32, metavar="N")
    parser.add_argument(
        "--protocol", default="grpc", choices=sorted(PROTOCOLS), help="the load generator's protocol"
    )
    parser.add_argument(
        "--gate", default="off", choices=("on", "off"), help="whether clients come through it"
    )
    parser.add_argument("--bare-chain", action="store_true", help="measure two models that do nothing too")
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="duration of a turn")
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N", help="turns")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
