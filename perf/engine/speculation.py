"""Measures new tokens per second with and without drafts, at batch 1 and in a full batch.

    python -m perf.engine.speculation [--drafters draft_model --draft-model DIR]

Kinds of prompts: answers that copy from the prompt (corrections, quotes, JSON); free chat, also in a full
batch; free chat after a long text, where attention makes drafts more expensive; and all of them with the
arrivals and a quarter of the lengths of a real trace, where the time counts in which an engine has work.
Engines take turns on each prompt, A B A B; in float32, and in any dtype with native kernels, the greedy
tokens must be the same, or no figure is shown. Besides the measurements the plot shows the speed that the
formula of Leviathan et al. (arXiv 2211.17192) predicts from the acceptance of first
draft tokens and the cost of a step.
"""

from __future__ import annotations

import argparse
import math
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from perf.common.report import plot_path, write_report
from perf.engine.traced_texts import compute, with_texts
from perf.server.open_loop import Arrival
from perf.server.trace_part import read_part

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.config.engine_config import CPU_QUANTIZATIONS, DEVICES, DRAFT_QUANTIZATIONS, DRAFTERS
from naiad.engine import Engine, build_engine
from naiad.model_runner import ModelRunner
from naiad.models.native_model import NativeModel
from naiad.outputs import EngineStats
from naiad.sequence import EngineRequest, SamplingParams
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.step_cost import StepCost

# Drafters that cost nothing besides verification, as the formula assumes.
_FREE = ("ngram", "suffix")
# A step cost with which drafts cost nothing.
_FLAT = [(1, 1.0), (1 << 16, 1.0)]
_LETTER = (
    "Dear Ms Novak, thank you for your order of 12 oak chairs and 3 round tables. We have recieved the "
    "payment on the 4th of May. The goods will be delivered to 18 Harbour Street on the 21st of May "
    "between 9 and 12 o'clock. Please make sure that the entrance is free. Kind regards, Peter Lang"
)
_PEOPLE = (
    '[{"name": "Alice Brown", "age": 25, "city": "Paris", "email": "alice@example.com"}, '
    '{"name": "Bob Green", "age": 31, "city": "London", "email": "bob@example.com"}, '
    '{"name": "Carol White", "age": 42, "city": "Berlin", "email": "carol@example.com"}]'
)
_CODE = (
    "def area(width, height):\n    return width * height\n\n"
    "def volume(width, height, depth):\n    return area(width, height) * depth\n\n"
    "def surface(width, height, depth):\n"
    "    return 2 * (area(width, height) + area(width, depth) + area(height, depth))\n"
)


def _long_text() -> str:
    """A text of about 2,500 tokens."""
    docs = Path(__file__).parents[2] / "docs"
    return "\n".join((docs / name).read_text() for name in ("scheduling.md", "speculation.md"))[:10_000]


PROMPTS = {
    "copying": (
        f"Correct the spelling of this letter and change nothing else:\n\n{_LETTER}",
        f"Repeat this JSON and change every age to 30:\n\n{_PEOPLE}",
        f"Write this code again with the word width replaced by length:\n\n{_CODE}",
        f"Quote this letter word by word, then say in one sentence what it is about:\n\n{_LETTER}",
    ),
    "free chat": (
        "What should I cook for four friends on a cold evening?",
        "Explain to a child why the sky is blue.",
        "Write a short story about a lighthouse keeper and a lost whale.",
        "Give me advice on learning to play the piano as an adult.",
    ),
    "long chat": tuple(
        f"{_long_text()}\n\n{question}"
        for question in (
            "Leave this text aside. Write a short story about a lighthouse keeper.",
            "Leave this text aside. Why is the sky blue?",
        )
    ),
}
# "trace": requests that come as in a recorded trace, with all of these texts.
KINDS = (*PROMPTS, "trace")


def main() -> int:
    """Measure, print, plot and write the results; return 1 if the tokens differ."""
    args = _parse()
    model_dir = str(resolve_model(args.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompts = {kind: [encode(tokenizer, text) for text in texts] for kind, texts in PROMPTS.items()}
    texts = [text for texts in PROMPTS.values() for text in texts]
    plain = _engine(model_dir, args)
    part = read_part(args.trace_requests, len(tokenizer), plain.max_model_len)
    arrivals = with_texts(part, texts, lambda text: encode(tokenizer, text), args.trace_rate)
    step_cost = ModelRunner(_config(model_dir, args)).measure_step_costs().step_cost
    rows = []
    for drafter in args.drafters:
        for num_tokens in args.num_speculative_tokens:
            measurements = _measurements(num_tokens, args)
            if not measurements:
                continue
            drafting = _engine(model_dir, args, drafter, num_tokens)
            if args.all_drafts and drafting._scheduler.speculator is not None:
                drafting._scheduler.speculator._policy = SpeculationPolicy(StepCost(_FLAT))
            for kind, batch in measurements:
                if kind == "trace":
                    row = _compare_trace(plain, drafting, arrivals, args)
                else:
                    row = _compare(plain, drafting, prompts[kind], batch, args)
                if row is None:
                    print("the tokens differ with drafts: no figure is shown", file=sys.stderr)
                    return 1
                if batch == 1 and drafter in _FREE:
                    row["predicted_ratio"] = round(_predicted(row, step_cost), 3)
                rows.append({"drafter": drafter, "k": num_tokens, "prompts": kind, "batch": batch} | row)
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            del drafting
    copying = [row for row in rows if row["batch"] == 1 and row["prompts"] == "copying"]
    if len(args.num_speculative_tokens) > 1 and copying:
        print("plot:", _plot(copying))
    print("written:", write_report("speculation", vars(args), rows))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument(
        "--drafters", nargs="+", default=["ngram", "suffix"], choices=DRAFTERS[2:], metavar="D"
    )
    parser.add_argument("--draft-model", default="", metavar="DIR", help="for the drafter draft_model")
    parser.add_argument(
        "--draft-quantization", default="auto", choices=DRAFT_QUANTIZATIONS, help="of the draft model"
    )
    parser.add_argument("--num-draft-layers", type=int, default=0, metavar="N", help="for the drafter self")
    parser.add_argument(
        "--num-speculative-tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="K"
    )
    parser.add_argument(
        "--all-drafts",
        action="store_true",
        help="verify every draft, whether it pays or not, to measure acceptance",
    )
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND", help="of prompts"
    )
    parser.add_argument("--output-tokens", type=at_least(2), default=120, metavar="N")
    parser.add_argument("--device", default="cpu", choices=DEVICES)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="with torch's ops near-ties may resolve differently in 16 bits: their number is printed",
    )
    parser.add_argument("--quantization", default="none", choices=CPU_QUANTIZATIONS)
    parser.add_argument("--full-batch", type=int, default=32, metavar="N")
    parser.add_argument("--trace-requests", type=at_least(2), default=32, metavar="N")
    parser.add_argument("--trace-rate", type=float, default=2.0, metavar="PER_S", help="requests a second")
    parser.add_argument("--repeats", type=at_least(1), default=5, metavar="N")
    return parser.parse_args()


def _measurements(num_speculative_tokens: int, args: argparse.Namespace) -> list[tuple[str, int]]:
    """Kinds of prompts and batch sizes, 0 = as requests come.

    All of them only for the number of tokens that can lose the most.
    """
    measurements = [("copying", 1)]
    if num_speculative_tokens == max(args.num_speculative_tokens):
        measurements += [("free chat", 1), ("long chat", 1), ("free chat", args.full_batch), ("trace", 0)]
    return [each for each in measurements if each[0] in args.kinds]


def _engine(model_dir: str, args: argparse.Namespace, drafter: str = "none", num_tokens: int = 8) -> Engine:
    return build_engine(_config(model_dir, args, drafter, num_tokens))


def _config(
    model_dir: str, args: argparse.Namespace, drafter: str = "none", num_tokens: int = 8
) -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        enable_prefix_caching=False,
        kv_cache_bytes=1 << 30,
        drafter=drafter,
        draft_model=args.draft_model if drafter == "draft_model" else "",
        draft_quantization=args.draft_quantization if drafter == "draft_model" else "auto",
        num_draft_layers=args.num_draft_layers if drafter == "self" else 0,
        num_speculative_tokens=num_tokens,
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a user's message with the checkpoint's chat template."""
    messages = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def _compare(
    plain: Engine, drafting: Engine, prompts: list[list[int]], batch: int, args: argparse.Namespace
) -> dict[str, Any] | None:
    """Decode speeds of both, their ratio, and the drafts' acceptance; None: the tokens differ."""
    before = drafting.stats()
    seconds: dict[str, list[float]] = {"plain": [], "drafting": []}
    num_timed = {"plain": 0, "drafting": 0}
    num_drafting = 0
    num_same = 0
    groups = [[prompt] for prompt in prompts] if batch == 1 else [(prompts * batch)[:batch]]
    for _ in range(args.repeats):
        for group in groups:
            made = {}
            for name, engine in (("plain", plain), ("drafting", drafting)):
                made[name], num_later, decode_s = _generate(engine, group, args.output_tokens)
                num_timed[name] += num_later
                seconds[name].append(decode_s)
            num_same += sum(a == b for a, b in zip(made["plain"], made["drafting"], strict=True))
            num_drafting += sum(map(len, made["drafting"]))
    num_texts = args.repeats * sum(map(len, groups))
    if num_same < num_texts and (args.dtype == "float32" or _is_native(plain)):
        return None
    speed = {name: num_timed[name] / sum(seconds[name]) for name in seconds}
    ratios = np.divide(seconds["plain"], seconds["drafting"]).reshape(args.repeats, len(groups))
    num_later_tokens = num_drafting - ratios.size * len(groups[0])
    return {
        "same_texts": f"{num_same} of {num_texts}",
        "plain_tokens_per_s": round(speed["plain"], 1),
        "drafting_tokens_per_s": round(speed["drafting"], 1),
        "ratio": round(speed["drafting"] / speed["plain"], 3),
        # Of a prompt, or of the full batch, over the repeats.
        "least_median_ratio": round(float(np.median(ratios, axis=0).min()), 3),
        "least_ratio": round(float(ratios.min()), 3),
        **_drafts_fate(before, drafting.stats(), num_later_tokens),
    }


def _compare_trace(
    plain: Engine, drafting: Engine, arrivals: list[Arrival], args: argparse.Namespace
) -> dict[str, Any] | None:
    """The same of requests that come as in a trace; the speed is that of the time in which there is work."""
    before = drafting.stats()
    ratios, num_same, num_drafting = [], 0, 0
    busy_s = {"plain": 0.0, "drafting": 0.0}
    for _ in range(args.repeats):
        made, plain_s = compute(plain, arrivals)
        drafted, drafting_s = compute(drafting, arrivals)
        ratios.append(plain_s / drafting_s)
        busy_s["plain"] += plain_s
        busy_s["drafting"] += drafting_s
        num_same += sum(a == b for a, b in zip(made, drafted, strict=True))
        num_drafting += sum(map(len, drafted))
    if num_same < args.repeats * len(arrivals) and (args.dtype == "float32" or _is_native(plain)):
        return None
    return {
        "same_texts": f"{num_same} of {args.repeats * len(arrivals)}",
        **{f"{name}_tokens_per_s": round(num_drafting / each, 1) for name, each in busy_s.items()},
        "ratio": round(busy_s["plain"] / busy_s["drafting"], 3),
        "least_median_ratio": round(float(np.median(ratios)), 3),
        "least_ratio": round(min(ratios), 3),
        **_drafts_fate(before, drafting.stats(), num_drafting - args.repeats * len(arrivals)),
    }


def _is_native(engine: Engine) -> bool:
    """Whether native kernels compute the steps: then drafts change no bit."""
    runner = engine._model_runner
    return isinstance(runner, ModelRunner) and isinstance(runner._model, NativeModel)


def _drafts_fate(before: EngineStats, after: EngineStats, num_tokens: int) -> dict[str, float]:
    """How many drafts were made and accepted between two moments, out of `num_tokens` possible ones."""
    windows = after.total_drafts - before.total_drafts
    drafted = after.total_draft_tokens - before.total_draft_tokens
    accepted_at = [
        b - a for a, b in zip(before.total_accepted_tokens_at, after.total_accepted_tokens_at, strict=True)
    ]
    return {
        "drafted": drafted,
        "accepted": sum(accepted_at),
        "acceptance_rate": round(sum(accepted_at) / drafted, 3) if drafted else math.nan,
        "first_acceptance_rate": round(accepted_at[0] / windows, 3) if windows else math.nan,
        "mean_window": round(drafted / windows, 2) if windows else 0.0,
        "rows_with_drafts": round(windows / (num_tokens - sum(accepted_at)), 3),
    }


def _predicted(row: dict[str, Any], step_cost: StepCost) -> float:
    """Speed-up by drafts at batch 1, if every draft token were accepted with the same probability a.

    A window of k tokens yields (1 - a**(k + 1)) / (1 - a) tokens in a step of 1 + k tokens; other steps
    yield one.
    """
    if not row["rows_with_drafts"]:
        return 1.0
    chance, window, share = (row[key] for key in ("first_acceptance_rate", "mean_window", "rows_with_drafts"))
    made = window + 1 if chance == 1 else (1 - chance ** (window + 1)) / (1 - chance)
    plain_s, window_s = step_cost(np.array([1, 1 + round(window)]))
    return float((1 + share * (made - 1)) / (1 + share * (window_s / plain_s - 1)))


def _generate(
    engine: Engine, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], int, float]:
    """Return the tokens, and how many came in how many seconds once every prompt had its first token.

    Every request is a tenant of its own, so that no drafter has seen the same answer before.
    """
    eos = engine.model_config.eos_token_ids
    params = SamplingParams(max_tokens=num_tokens, stop_token_ids=eos)
    for number, prompt in enumerate(prompts):
        request = EngineRequest(
            sequence_id=number, prompt_token_ids=prompt, params=params, cache_salt=secrets.token_hex(8)
        )
        engine.add_request(request)
    made: list[list[int]] = [[] for _ in prompts]
    start_s, num_before = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            made[output.sequence_id] += output.token_ids
        if not start_s and all(made):
            start_s, num_before = time.perf_counter(), sum(map(len, made))
    return made, sum(map(len, made)) - num_before, time.perf_counter() - start_s


def _plot(rows: list[dict[str, Any]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    speed, acceptance = figure.subplots(1, 2)
    for number, drafter in enumerate(dict.fromkeys(row["drafter"] for row in rows)):
        mine = [row for row in rows if row["drafter"] == drafter]
        window, color = [row["k"] for row in mine], f"C{number}"
        speed.plot(window, [row["ratio"] for row in mine], "o-", color=color, label=f"{drafter}, measured")
        if drafter in _FREE:
            predicted = [row["predicted_ratio"] for row in mine]
            speed.plot(window, predicted, "x--", color=color, label=f"{drafter}, predicted")
        acceptance.plot(window, [row["acceptance_rate"] for row in mine], "o-", color=color, label=drafter)
    speed.axhline(1.0, color="grey", linewidth=0.8)
    speed.set(ylabel="decode speed relative to no drafts", ylim=(0, None))
    acceptance.set(ylabel="share of draft tokens accepted", ylim=(0, 1))
    for axes in (speed, acceptance):
        axes.set(xlabel="maximum draft tokens per step", xscale="log", xticks=window, xticklabels=window)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("answers that copy from the prompt, batch 1")
    name = "speculation" if all(row["drafter"] in _FREE for row in rows) else "speculation-models"
    path = plot_path(name)
    figure.savefig(path, dpi=120)
    return path.name


if __name__ == "__main__":
    sys.exit(main())
