"""What drafts bring: new tokens per second with and without, at batch 1 and in a full batch.

    python -m perf.engine.speculation [--drafters draft_model --draft-model DIR]

Two kinds of prompts: answers that copy from the prompt (corrections, quotes, JSON), and free chat.
Engines take turns on each prompt, A B A B; greedy tokens must be the same, or no figure is shown.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import Any

import transformers
from perf.common.report import plot_path, write_report

from naiad.cli.fetch_model import resolve_model
from naiad.config import EngineConfig
from naiad.config.engine_config import DRAFTERS
from naiad.engine import Engine, build_engine
from naiad.sequence import EngineRequest, SamplingParams

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
}


def main() -> int:
    """Measure, print, plot, write; 1 if the tokens differ."""
    args = _parse()
    model_dir = str(resolve_model(args.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompts = {kind: [_encode(tokenizer, text) for text in texts] for kind, texts in PROMPTS.items()}
    plain = _engine(model_dir, args)
    rows = []
    for drafter in args.drafters:
        for num_tokens in args.num_speculative_tokens:
            drafting = _engine(model_dir, args, drafter, num_tokens)
            for kind, batch in [*((kind, 1) for kind in prompts), ("free chat", args.full_batch)]:
                row = _compare(plain, drafting, prompts[kind], batch, args)
                if row is None:
                    print("the tokens differ with drafts: no figure is shown", file=sys.stderr)
                    return 1
                rows.append({"drafter": drafter, "k": num_tokens, "prompts": kind, "batch": batch} | row)
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            del drafting
    print("plot:", _plot([row for row in rows if row["batch"] == 1 and row["prompts"] == "copying"]))
    print("written:", write_report("speculation", vars(args), rows))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument(
        "--drafters", nargs="+", default=["ngram", "suffix"], choices=DRAFTERS[1:], metavar="D"
    )
    parser.add_argument("--draft-model", default="", metavar="DIR", help="for the drafter draft_model")
    parser.add_argument("--num-draft-layers", type=int, default=0, metavar="N", help="for the drafter self")
    parser.add_argument("--num-speculative-tokens", nargs="+", type=int, default=[2, 4, 8], metavar="K")
    parser.add_argument("--output-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--full-batch", type=int, default=32, metavar="N")
    parser.add_argument("--repeats", type=int, default=2, metavar="N")
    return parser.parse_args()


def _engine(model_dir: str, args: argparse.Namespace, drafter: str = "none", num_tokens: int = 8) -> Engine:
    return build_engine(
        EngineConfig(
            model_dir=model_dir,
            dtype="float32",
            enable_prefix_caching=False,
            kv_cache_bytes=1 << 30,
            drafter=drafter,
            draft_model=args.draft_model if drafter == "draft_model" else "",
            num_draft_layers=args.num_draft_layers if drafter == "self" else 0,
            num_speculative_tokens=num_tokens,
        )
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def _compare(
    plain: Engine, drafting: Engine, prompts: list[list[int]], batch: int, args: argparse.Namespace
) -> dict[str, float] | None:
    """Decode tokens per second of both, their ratio, and the drafts' fate; None: other tokens."""
    before = drafting.stats()
    seconds: dict[str, list[float]] = {"plain": [], "drafting": []}
    num_tokens = 0
    groups = [[prompt] for prompt in prompts] if batch == 1 else [(prompts * batch)[:batch]]
    for _ in range(args.repeats):
        for group in groups:
            made = {}
            for name, engine in (("plain", plain), ("drafting", drafting)):
                made[name], decode_s = _generate(engine, group, args.output_tokens)
                seconds[name].append(decode_s)
            if made["plain"] != made["drafting"]:
                return None
            num_tokens += sum(len(tokens) for tokens in made["plain"])
    after = drafting.stats()
    drafted = after.total_draft_tokens - before.total_draft_tokens
    accepted = sum(after.total_accepted_tokens_at) - sum(before.total_accepted_tokens_at)
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["drafting"], strict=True)]
    return {
        "plain_tokens_per_s": round(num_tokens / sum(seconds["plain"]), 1),
        "drafting_tokens_per_s": round(num_tokens / sum(seconds["drafting"]), 1),
        "ratio": round(sum(seconds["plain"]) / sum(seconds["drafting"]), 3),
        "median_ratio": round(statistics.median(ratios), 3),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": round(accepted / drafted, 3) if drafted else math.nan,
    }


def _generate(engine: Engine, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
    """The tokens, and the seconds after every prompt has its first one."""
    eos = engine.model_config.eos_token_ids
    params = SamplingParams(max_tokens=num_tokens, stop_token_ids=eos)
    for number, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))
    made: list[list[int]] = [[] for _ in prompts]
    start_s = 0.0
    while engine.has_work:
        for output in engine.step():
            made[output.sequence_id] += output.token_ids
        if not start_s and all(made):
            start_s = time.perf_counter()
    return made, time.perf_counter() - start_s


def _plot(rows: list[dict[str, Any]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        mine = [row for row in rows if row["drafter"] == drafter]
        axes.plot([row["k"] for row in mine], [row["ratio"] for row in mine], marker="o", label=drafter)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="draft tokens in a step, at most", ylabel="decode speed, of that without drafts")
    axes.set_title("answers that copy from the prompt, batch 1")
    axes.grid(alpha=0.3)
    axes.legend()
    path = plot_path("speculation")
    figure.savefig(path, dpi=120)
    return path.name


if __name__ == "__main__":
    sys.exit(main())
