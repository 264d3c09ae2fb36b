"""Compares the engine in process with `generate` of `transformers`, in turns, in one run.

    python -m perf.engine.compare_transformers --batch 1,8,32

Both get the same prompts and dtype and generate the same number of tokens. In float32 the greedy ids
must be equal, or no speed is reported.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from perf.common.report import print_table, write_results
from perf.common.transformers_generate import transformers_generate

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import (
    Generate,
    Prompts,
    Timing,
    Work,
    engine_generate,
    load_engine,
    measure,
    random_prompts,
)
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig

_NUM_CHECKED_TOKENS = 32


def main() -> int:
    """Measure, print and write the results; return 1 if the tokens differ."""
    args = _parse()
    model_dir = resolve_model(args.model)
    batches = [int(part) for part in args.batch.split(",")]
    config = EngineConfig(model_dir=str(model_dir), dtype=args.dtype, max_num_seqs=max(batches))
    engine, dtype = load_engine(config)
    contestants = {"engine": engine_generate(engine), "transformers": transformers_generate(model_dir, dtype)}
    timings: dict[int, dict[str, Timing]] = {}
    for batch in batches:
        work = Work(batch, args.prompt_tokens, args.output_tokens)
        make_prompts = partial(random_prompts, work, engine.model_config.vocab_size)
        same = num_same_prompts(contestants["engine"], contestants["transformers"], make_prompts(-1))
        print(
            f"batch {batch}: {same} of {batch} prompts give the same {_NUM_CHECKED_TOKENS} tokens", flush=True
        )
        if dtype == "float32" and same < batch:
            print("the greedy tokens differ in float32: no speed is reported", file=sys.stderr)
            return 1
        timings[batch] = measure(contestants, make_prompts, work, args.repeats)
    print_table(timings, rival="transformers")
    settings = vars(args) | {"model": model_dir.name, "dtype": dtype}
    print("written:", write_results("engine", settings, timings))
    return 0


def num_same_prompts(one: Generate, other: Generate, prompts: Prompts) -> int:
    """Number of prompts for which both generate the same tokens."""
    pairs = zip(one(prompts, _NUM_CHECKED_TOKENS), other(prompts, _NUM_CHECKED_TOKENS), strict=True)
    return sum(ours == theirs for ours, theirs in pairs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batch", default="1,8,32", metavar="N,…")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="the median is reported")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
