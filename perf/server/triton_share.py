"""Measures the cost of the server: the engine in process, and through `text`, `llm` and `ensemble`.

    python -m perf.server.triton_share

All four get concurrent prompts of the same length and stream the same number of tokens; the server runs
from the first turn to the last. In a turn the engine in process runs before and after each model,
A B A C A D A, and a model's share is its speed divided by the mean of the engine's passes before and after
it, so that drifts of the machine's speed cancel out. The targets apply to the medians over the turns. The
load generator shares the machine with the server, while the engine in process has it to itself. Both get
the same token budget: budgets that each measured by itself would differ by more than the models do. A
configured budget counts tokens alone, without the cost of context and of running sequences.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from perf.common.awake import cores_kept_awake
from perf.common.plots import Panel, save_panels
from perf.common.report import print_rows, write_report
from perf.common.word_prompts import single_token_words, word_prompts
from perf.server.load import PROTOCOLS, CountedTokens, llm_generate, text_generate
from perf.server.serve_process import naiad_serve
from transformers import AutoTokenizer

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import Prompts, Work, engine_generate, load_engine
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.engine_process.clients.engine_child import child_environment

# Targets: the share of the engine's tokens per second that each model keeps.
ASKED = {"text": 0.9, "llm": 0.9, "ensemble": 0.85}
_NUM_CHECKED_TOKENS = 16
_CPU_BUDGET = 128

Contestants = Mapping[str, Callable[[Prompts, int], Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """New tokens per second; the time includes prompts.

    Attributes:
        engine: the engine in process, before the first model and after each.
        models: each model through the server, in order.
        stolen: share of the machine's time that its host gave to other machines.
    """

    engine: Sequence[float]
    models: Mapping[str, float]
    stolen: float = 0.0

    def share(self, name: str) -> float:
        """A model's speed relative to the mean of the engine's passes before and after it."""
        if name == "engine":
            return 1.0
        place = list(self.models).index(name)
        return self.models[name] / statistics.mean(self.engine[place : place + 2])

    def tokens_per_s(self, name: str) -> float:
        """A model's speed, or the engine's average."""
        return self.models[name] if name in self.models else statistics.mean(self.engine)


def main() -> int:
    """Measure, print, plot and write; return 1 if the server's tokens differ from the engine's."""
    args = _parse()
    _take_settings_of_engine_process()
    model_dir = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    is_cuda = torch.cuda.is_available()
    budget = args.max_num_batched_tokens or (0 if is_cuda else max(_CPU_BUDGET, args.concurrency))
    # A contestant must not reuse what the previous one has computed.
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype=args.dtype,
        quantization=args.quantization,
        drafter=args.drafter,
        max_num_seqs=args.concurrency,
        enable_prefix_caching=False,
        max_num_batched_tokens=budget,
    )
    engine, dtype = load_engine(config)
    work = Work(args.concurrency, args.prompt_tokens, args.output_tokens)
    make_prompts = partial(word_prompts, work, tokenizer.encode(""), single_token_words(tokenizer))
    options = [
        *("--model", str(model_dir), "--dtype", dtype, "--max-num-seqs", str(args.concurrency)),
        *("--quantization", args.quantization, "--drafter", args.drafter),
        *("--enable-prefix-caching", "false"),
        *("--max-num-batched-tokens", str(budget)),
    ]
    with cores_kept_awake() if args.keep_awake else nullcontext(), naiad_serve(options) as server:
        counted = CountedTokens(server)
        contestants: Contestants = {
            "engine": engine_generate(engine),
            "text": counted.of(text_generate(server, "text", decode, args.protocol)),
            "llm": counted.of(llm_generate(server, args.protocol)),
            "ensemble": counted.of(text_generate(server, "ensemble", decode, args.protocol)),
        }
        if not _is_same(contestants, make_prompts("check"), decode, dtype):
            return 1
        taken: list[Turn] = []
        while len(calm(taken, args.max_stolen)) < args.repeats and len(taken) < 3 * args.repeats:
            taken.append(take_turn(contestants, make_prompts, work, len(taken)))
            counted.check()
            print_rows(rows(taken[-1:]))
    settings = {"model": model_dir.name, "dtype": dtype, "token budget": budget}
    return _report(calm(taken, args.max_stolen), len(taken), args, settings)


def _report(turns: Sequence[Turn], num_taken: int, args: argparse.Namespace, more: dict[str, Any]) -> int:
    """Print, plot and write the turns that count; return the exit code."""
    if not turns:
        print(f"no turn was calm: the host took more than {args.max_stolen:.0%} each time", file=sys.stderr)
        return 1
    results = rows(turns)
    print(f"medians of {len(turns)} turns; {num_taken - len(turns)} more were disturbed and do not count:")
    print_rows(results)
    settings = vars(args) | more | {"turns": len(turns), "turns with the disturbed": num_taken}
    plot = _plot(turns, args.concurrency)
    print("plot:", plot, "written:", write_report("triton-share", settings, results))
    return 0


def _take_settings_of_engine_process() -> None:
    """Restart this process with the engine process's GOMP_SPINCOUNT, which is read at import."""
    name = "GOMP_SPINCOUNT"
    if name not in os.environ:
        os.execve(sys.executable, sys.orig_argv, os.environ | {name: child_environment()[name]})


def take_turn(
    contestants: Contestants, make_prompts: Callable[[str], Prompts], work: Work, number: int
) -> Turn:
    """Run the engine, a model, the engine, a model, …, the engine.

    Args:
        contestants: `engine` and the models; no prompt is used twice.
        make_prompts: seed → `work.batch` prompts.
        work: the work of each pass.
        number: the turn's number.
    """

    def tokens_per_s(name: str, seed: str) -> float:
        prompts = make_prompts(f"{number} {seed}")
        start_s = time.perf_counter()
        contestants[name](prompts, work.output_tokens)
        return work.batch * work.output_tokens / (time.perf_counter() - start_s)

    before = psutil.cpu_times()
    engine = [tokens_per_s("engine", "engine")]
    models: dict[str, float] = {}
    for name in contestants:
        if name != "engine":
            models[name] = tokens_per_s(name, name)
            engine.append(tokens_per_s("engine", f"engine after {name}"))
    return Turn(engine, models, _stolen(before, psutil.cpu_times()))


def calm(turns: Sequence[Turn], max_stolen: float) -> list[Turn]:
    """The turns in which the machine's host gave at most this share of the time to other machines."""
    return [turn for turn in turns if turn.stolen <= max_stolen]


def _stolen(before: Any, after: Any) -> float:
    """The share of the time that a virtual machine's host gave to others; 0 if it is not reported."""
    spent = sum(new - old for new, old in zip(after, before, strict=True))
    stolen = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    return float(max(0.0, stolen) / max(spent, 1e-9))


def rows(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Medians over the turns: of speeds and of shares."""
    result: list[dict[str, Any]] = []
    for name in ("engine", *turns[0].models):
        shares = [turn.share(name) for turn in turns]
        result.append(
            {
                "through": name,
                "all new tokens/s": _median(turn.tokens_per_s(name) for turn in turns),
                "of the engine": round(statistics.median(shares), 3),
                "turns": " ".join(f"{share:.2f}" for share in shares),
                "asked": ASKED.get(name, 1.0),
                "taken by the host": round(statistics.median(turn.stolen for turn in turns), 3),
            }
        )
    return result


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 1)


def _is_same(
    contestants: Contestants, prompts: Prompts, decode: Callable[[list[int]], str], dtype: str
) -> bool:
    """Whether all generate the engine's tokens; in 16 bits, batches may resolve near-ties differently."""
    made = {name: generate(prompts, _NUM_CHECKED_TOKENS) for name, generate in contestants.items()}
    texts = [
        decode(prompt + ids).removeprefix(decode(prompt))
        for prompt, ids in zip(prompts, made["engine"], strict=True)
    ]
    for name, outputs in made.items():
        expected = texts if isinstance(outputs[0], str) else made["engine"]
        num_same = sum(ours == theirs for ours, theirs in zip(outputs, expected, strict=True))
        print(f"{name}: {num_same} of {len(prompts)} prompts have the engine's tokens", flush=True)
        if dtype == "float32" and num_same < len(prompts):
            print("the server's tokens differ in float32: no speed is reported", file=sys.stderr)
            return False
    return True


def _plot(turns: Sequence[Turn], batch: int) -> str:
    numbers = list(range(1, len(turns) + 1))
    labels = {name: f"{name}, asked ≥ {asked:g}" for name, asked in ASKED.items()}
    speed = {
        labels.get(name, name): (numbers, [turn.tokens_per_s(name) for turn in turns])
        for name in ("engine", *labels)
    }
    shares = {label: (numbers, [turn.share(name) for turn in turns]) for name, label in labels.items()}
    panels = [
        Panel("turn", "all new tokens/s", speed),
        Panel("turn", "of the engine in process", shares, ("as fast as the engine", 1.0)),
    ]
    streams = "one stream" if batch == 1 else f"{batch} streams"
    return save_panels("triton-share", f"the server's share, {streams}", panels)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--drafter", default="auto", help="none: without drafts (default: auto)")
    parser.add_argument("--concurrency", type=int, default=32, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=128, metavar="N")
    budget = "token budget of a step; 0: on a CPU the number of streams, at least 128; on a GPU the default"
    parser.add_argument("--max-num-batched-tokens", type=at_least(0), default=0, metavar="N", help=budget)
    protocol = "the load generator's protocol; it shares the cores, and gRPC takes several times the CPU time"
    parser.add_argument("--protocol", default="sse", choices=sorted(PROTOCOLS), help=protocol)
    parser.add_argument("--keep-awake", action="store_true", help="keep all cores awake, on a shared host")
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N", help="turns that count")
    limit = "turns in which a virtual machine's host takes more than this share of the time do not count"
    parser.add_argument("--max-stolen", type=float, default=0.05, metavar="X", help=limit)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
