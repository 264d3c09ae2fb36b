"""What the server costs: the engine in process, and through `text`, `llm` and `ensemble`.

    python -m perf.server.triton_share

All four get prompts of the same length at the same time and stream the same number of tokens. They
take turns, A B C D A B C D, on a server that runs from the first turn to the last; each turn gives a
ratio, and the medians of the ratios are what is asked for. The load generator shares the machine
with the server, while the engine in process has it to itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from perf.common.arguments import at_least
from perf.common.plots import Panel, save_panels
from perf.common.report import print_rows, write_report
from perf.common.word_prompts import single_token_words, word_prompts
from perf.server.load import llm_generate, text_generate
from perf.server.serve_process import naiad_serve
from transformers import AutoTokenizer

from naiad.cli.fetch_model import resolve_model
from naiad.cli.throughput import Prompts, Timing, Work, engine_generate, load_engine, measure
from naiad.config import EngineConfig
from naiad.engine_process.child import child_environment

# The part of the engine's tokens per second that each is asked to keep.
ASKED = {"text": 0.9, "llm": 0.9, "ensemble": 0.8}
_NUM_CHECKED_TOKENS = 16

Contestants = Mapping[str, Callable[[Prompts, int], Sequence[Any]]]


def main() -> int:
    """Measure, print, plot, write; 1 if the server makes other tokens than the engine in process."""
    args = _parse()
    _take_settings_of_engine_process()
    model_dir = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    # What one contestant has computed must not help the next.
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype=args.dtype,
        max_num_seqs=args.concurrency,
        enable_prefix_caching=False,
    )
    engine, dtype = load_engine(config)
    work = Work(args.concurrency, args.prompt_tokens, args.output_tokens)
    make_prompts = partial(word_prompts, work, tokenizer.encode(""), single_token_words(tokenizer))
    options = [
        *("--model", str(model_dir), "--dtype", dtype, "--max-num-seqs", str(args.concurrency)),
        *("--enable-prefix-caching", "false"),
    ]
    with naiad_serve(options) as server:
        contestants: Contestants = {
            "engine": engine_generate(engine),
            "text": text_generate(server, "text", decode),
            "llm": llm_generate(server.grpc),
            "ensemble": text_generate(server, "ensemble", decode),
        }
        if not _is_same(contestants, make_prompts("check"), decode, dtype):
            return 1
        turns = []
        for turn in range(args.repeats):
            make = partial(_prompts_of_turn, make_prompts, turn)
            turns.append(measure(contestants, make, work, repeats=1))
            print_rows(rows(turns[-1:]))
    results = rows(turns)
    print(f"medians of {args.repeats} turns:")
    print_rows(results)
    settings = vars(args) | {"model": model_dir.name, "dtype": dtype}
    print("plot:", _plot(turns), "written:", write_report("triton-share", settings, results))
    return 0


def _take_settings_of_engine_process() -> None:
    """Start anew where threads wait otherwise than the engine process's do: it is read at the import."""
    name = "GOMP_SPINCOUNT"
    if name not in os.environ:
        os.execve(sys.executable, sys.orig_argv, os.environ | {name: child_environment()[name]})


def _prompts_of_turn(make_prompts: Callable[[str], Prompts], turn: int, seed: int) -> Prompts:
    """No turn has the prompts of another."""
    return make_prompts(f"{turn} {seed}")


def rows(turns: Sequence[Mapping[str, Timing]]) -> list[dict[str, Any]]:
    """Medians over the turns, and of the turns' ratios to the engine in process."""
    result = []
    for name in turns[0]:
        shares = _shares(turns, name)
        result.append(
            {
                "through": name,
                "decode tokens/s": _median(turn[name].decode_tokens_per_s for turn in turns),
                "all new tokens/s": _median(turn[name].output_tokens_per_s for turn in turns),
                "of the engine": round(statistics.median(shares), 3),
                "least": round(min(shares), 3),
                "most": round(max(shares), 3),
                "asked": ASKED.get(name, 1.0),
            }
        )
    return result


def _shares(turns: Sequence[Mapping[str, Timing]], name: str) -> list[float]:
    return [turn[name].output_tokens_per_s / turn["engine"].output_tokens_per_s for turn in turns]


def _median(values: Any) -> float:
    return round(statistics.median(values), 1)


def _is_same(
    contestants: Contestants, prompts: Prompts, decode: Callable[[list[int]], str], dtype: str
) -> bool:
    """Whether all make the engine's tokens; in a 16-bit type another batch may turn close calls."""
    made = {name: generate(prompts, _NUM_CHECKED_TOKENS) for name, generate in contestants.items()}
    texts = [
        decode(prompt + ids).removeprefix(decode(prompt))
        for prompt, ids in zip(prompts, made["engine"], strict=True)
    ]
    for name, outputs in made.items():
        expected = texts if isinstance(outputs[0], str) else made["engine"]
        num_same = sum(ours == theirs for ours, theirs in zip(outputs, expected, strict=True))
        print(f"{name}: {num_same} of {len(prompts)} prompts give the engine's tokens", flush=True)
        if dtype == "float32" and num_same < len(prompts):
            print("the server makes other tokens in float32: no speed is reported", file=sys.stderr)
            return False
    return True


def _plot(turns: Sequence[Mapping[str, Timing]]) -> str:
    numbers = list(range(1, len(turns) + 1))
    speed = {name: (numbers, [turn[name].output_tokens_per_s for turn in turns]) for name in turns[0]}
    shares = {f"{name}, asked ≥ {asked:g}": (numbers, _shares(turns, name)) for name, asked in ASKED.items()}
    batch = next(iter(turns[0].values())).batch
    panels = [
        Panel("turn", "all new tokens/s", speed),
        Panel("turn", "of the engine in process", shares, ("engine", 1.0)),
    ]
    return save_panels("triton-share", f"the server's share, {batch} streams", panels)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--concurrency", type=int, default=32, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
