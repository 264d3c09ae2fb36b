"""Compares the engine in process, `llm` and `ensemble` through the server, and `transformers`, in one run.

    python -m perf.server.throughput

All four get the same prompts and generate the same number of tokens; they take turns. The server is
`naiad serve`, started here on free ports and stopped at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from perf.common.report import print_table, write_results
from perf.common.transformers_generate import transformers_generate
from perf.common.word_prompts import single_token_words, word_prompts
from perf.server.load import CountedTokens, llm_generate, text_generate
from perf.server.serve_process import naiad_serve
from transformers import AutoTokenizer

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import Generate, Prompts, Timing, Work, engine_generate, load_engine, measure
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig

_NUM_CHECKED_TOKENS = 16

Contestant = Callable[[Prompts, int], object]


def main() -> int:
    """Measure, print and write; return 1 if the server's tokens differ from the engine's."""
    args = _parse()
    model_dir = resolve_model(args.model)
    batches = [int(part) for part in args.concurrency.split(",")]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    # A contestant must not reuse what the previous one has computed.
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype=args.dtype,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
    )
    engine, dtype = load_engine(config)
    in_process = engine_generate(engine)
    options = [
        *("--model", str(model_dir), "--dtype", dtype, "--max-num-seqs", str(max(batches))),
        *("--enable-prefix-caching", "false"),
    ]
    timings: dict[int, dict[str, Timing]] = {}
    with naiad_serve(options) as server:
        counted = CountedTokens(server)
        served = counted.of(llm_generate(server))
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        contestants: dict[str, Contestant] = {
            "transformers": transformers_generate(model_dir, dtype),
            "engine": in_process,
            "llm": served,
            "ensemble": counted.of(text_generate(server, "ensemble", decode)),
        }
        for batch in batches:
            work = Work(batch, args.prompt_tokens, args.output_tokens)
            make_prompts = partial(word_prompts, work, tokenizer.encode(""), single_token_words(tokenizer))
            if not _is_same(in_process, served, make_prompts(-1), dtype):
                return 1
            timings[batch] = measure(contestants, make_prompts, work, args.repeats)
            counted.check()
            print_table({batch: timings[batch]}, rival="transformers")
    settings = vars(args) | {"model": model_dir.name, "dtype": dtype}
    print("written:", write_results("server", settings, timings))
    return 0


def _is_same(in_process: Generate, served: Generate, prompts: Prompts, dtype: str) -> bool:
    pairs = zip(in_process(prompts, _NUM_CHECKED_TOKENS), served(prompts, _NUM_CHECKED_TOKENS), strict=True)
    num_same = sum(ours == theirs for ours, theirs in pairs)
    print(f"concurrency {len(prompts)}: {num_same} prompts have the engine's tokens", flush=True)
    if dtype == "float32" and num_same < len(prompts):
        print("the server's tokens differ in float32: no speed is reported", file=sys.stderr)
        return False
    return True


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--concurrency", default="1,8,32", metavar="N,…")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--output-tokens", type=at_least(2), default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="the median is reported")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
