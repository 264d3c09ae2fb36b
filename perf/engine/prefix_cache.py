"""Measures time to first token with a shared system prompt, for the first request and for the others.

    python -m perf.engine.prefix_cache

Requests share their first tokens and differ in the last ones. They arrive one by one, then all at
once. The greedy tokens must equal those of an engine without a prefix cache, or no figure is shown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import replace

from perf.common.report import write_report

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.sequence import EngineRequest, SamplingParams

_OWN_TOKENS = 8
_NEW_TOKENS = 4


def main() -> int:
    """Measure, print and write the results; return 1 if the tokens differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--shared-tokens", type=int, default=1000, metavar="N")
    parser.add_argument("--requests", type=int, default=32, metavar="N")
    args = parser.parse_args()
    config = EngineConfig(
        model_dir=str(resolve_model(args.model)), dtype="float32", max_num_seqs=args.requests
    )
    cached, plain = build_engine(config), build_engine(replace(config, enable_prefix_caching=False))
    results = []
    expected: tuple[list[list[int]], list[list[int]]] | None = None
    for name, engine in (("without", plain), ("with", cached)):
        one_by_one, tokens = _one_by_one(engine, _prompts(args, seed=1))
        all_at_once_s, tokens_at_once = _all_at_once(engine, _prompts(args, seed=2))
        expected = expected or (tokens, tokens_at_once)
        if (tokens, tokens_at_once) != expected:
            print("the tokens differ with the cache: no figure is shown", file=sys.stderr)
            return 1
        results.append(
            {
                "cache": name,
                "first_ttft_s": round(one_by_one[0], 4),
                "median_ttft_of_others_s": round(statistics.median(one_by_one[1:]), 4),
                "all_at_once_last_ttft_s": round(all_at_once_s, 4),
            }
        )
    for each in results:
        print(
            f"{each['cache']:>8} cache: first {each['first_ttft_s']} s, others (median) "
            f"{each['median_ttft_of_others_s']} s; all {args.requests} at once: "
            f"{each['all_at_once_last_ttft_s']} s to the last one's first token"
        )
    print("written:", write_report("prefix-cache", vars(args), results))
    return 0


def _prompts(args: argparse.Namespace, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(1000, 40_000) for _ in range(args.shared_tokens)]
    return [shared + [draw.randrange(1000, 40_000) for _ in range(_OWN_TOKENS)] for _ in range(args.requests)]


def _request(sequence_id: int, prompt: list[int]) -> EngineRequest:
    params = SamplingParams(max_tokens=_NEW_TOKENS)
    return EngineRequest(sequence_id=sequence_id, prompt_token_ids=prompt, params=params)


def _one_by_one(engine: Engine, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """Return each request's seconds to the first token, and its tokens."""
    times, made = [], []
    for number, prompt in enumerate(prompts):
        start_s = time.perf_counter()
        engine.add_request(_request(number, prompt))
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                if output.token_ids and not tokens:
                    times.append(time.perf_counter() - start_s)
                tokens += output.token_ids
        made.append(tokens)
    return times, made


def _all_at_once(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Return the seconds until every request has its first token, and the tokens."""
    start_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(_request(number, prompt))
    made: list[list[int]] = [[] for _ in prompts]
    last_s = 0.0
    while engine.has_work:
        for output in engine.step():
            made[output.sequence_id] += output.token_ids
        if all(made) and not last_s:
            last_s = time.perf_counter() - start_s
    return last_s, made


if __name__ == "__main__":
    sys.exit(main())
