"""Measures the sampler alone, on random logits.

    python -m perf.engine.sampler --rows 1,32,256

Prints the median milliseconds of one pass for rows that use no feature, one feature each, and all of
them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from perf.common.report import write_report

from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams, Sequence

_PROMPT_TOKENS = 512
_OUTPUT_TOKENS = 128
_MASKS: dict[str, Any] = {
    "logit_bias": tuple((n, 1.0) for n in range(300)),
    "bad_words": tuple((n, n + 1) for n in range(100)),
    "min_tokens": 1000,
    "stop_token_ids": (1, 2),
}
_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
_FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
_LOGPROBS: dict[str, Any] = {"num_log_probs": 20, "returns_generation_logits": True}
_ALLOWED: dict[str, Any] = {"allowed_token_ids": tuple(range(0, 40_000, 2))}
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k, top-p, min-p": _FILTERS,
    "penalties": _PENALTIES,
    "bias, bad words, min_tokens": _MASKS,
    "allowed ids": _ALLOWED,
    "log-probs, logits": _LOGPROBS,
    "everything": {**_FILTERS, **_PENALTIES, **_MASKS, **_ALLOWED, **_LOGPROBS},
}


def main() -> None:
    """Measure and print a table."""
    args = _parse()
    counts = [int(part) for part in args.rows.split(",")]
    print(f"ms a pass, vocabulary {args.vocab_size}, {torch.get_num_threads()} threads")
    print("| rows |", " | ".join(map(str, counts)), "|")
    print("|---|" + "---|" * len(counts))
    results = []
    for kind, params in _KINDS.items():
        times = [_milliseconds(num_rows, args.vocab_size, params, args.repeats) for num_rows in counts]
        print(f"| {kind} |", " | ".join(f"{each:.2f}" for each in times), "|", flush=True)
        rows = zip(counts, times, strict=True)
        results += [{"kind": kind, "rows": count, "ms": round(each, 3)} for count, each in rows]
    print("written:", write_report("sampler", vars(args), results))


@torch.inference_mode()
def _milliseconds(num_rows: int, vocab_size: int, params: dict[str, Any], repeats: int) -> float:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    token_ids = torch.randint(vocab_size, (num_rows, _PROMPT_TOKENS + _OUTPUT_TOKENS), generator=generator)
    rows = [
        Sequence(
            sequence_id=index,
            token_ids=ids,
            num_prompt_tokens=_PROMPT_TOKENS,
            params=SamplingParams(max_tokens=10_000, seed=index, **params),
            arrival_s=0.0,
        )
        for index, ids in enumerate(token_ids.tolist())
    ]
    sampler = Sampler(vocab_size)
    times = []
    for _ in range(repeats + 1):
        fresh = logits.clone()
        start_s = time.perf_counter()
        sampler.sample(fresh, rows)
        times.append(time.perf_counter() - start_s)
    return 1000 * statistics.median(times[1:])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,32,256", metavar="N,…")
    parser.add_argument("--vocab-size", type=int, default=49_152, metavar="N")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="the median is reported")
    return parser.parse_args()


if __name__ == "__main__":
    main()
