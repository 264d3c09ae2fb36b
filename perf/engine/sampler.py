"""Measures the sampler alone, on random logits.

    python -m perf.engine.sampler --rows 1,32,256

Prints the median milliseconds of one pass for rows that use no feature, one feature each, and all of
them: picked by torch and by the native kernels, in turns. Both must sample the same tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch
from perf.common.report import write_report

from naiad.models.native_picker import NativePicker
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler import Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.native.build import load
from naiad_kernels.native.variants import best_variant

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
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k, top-p, min-p": _FILTERS,
    "penalties": _PENALTIES,
    "bias, bad words, min_tokens": _MASKS,
    "allowed ids": _ALLOWED,
    "log-probs, logits": _LOGPROBS,
    "everything": {**_FILTERS, **_PENALTIES, **_MASKS, **_ALLOWED, **_LOGPROBS},
}


def main() -> int:
    """Measure, print and write the results; return 1 if the tokens differ."""
    args = _parse()
    counts = [int(part) for part in args.rows.split(",")]
    num_threads = args.threads or len(os.sched_getaffinity(0))
    # As in the engine: torch computes what is left with one thread.
    torch.set_num_threads(1)
    samplers = {"torch": Sampler(args.vocab_size)}
    variant = best_variant()
    if variant is not None:
        picker = NativePicker(args.vocab_size, load(variant).new_team(num_threads))
        samplers["native"] = Sampler(args.vocab_size, pick=picker)
    print(f"ms a pass, vocabulary {args.vocab_size}; torch: 1 thread, native: {num_threads}")
    headers = [f"{count}, {name}" for count in counts for name in samplers]
    print("| rows |", " | ".join(headers), "|")
    print("|---|" + "---|" * len(headers))
    results = []
    for kind, params in _KINDS.items():
        times: list[float] = []
        for count in counts:
            found = _milliseconds(samplers, count, args.vocab_size, params, args.repeats)
            if found is None:
                print(f"{kind}, {count} rows: the samplers drew different tokens", file=sys.stderr)
                return 1
            times += found.values()
            results += [
                {"kind": kind, "rows": count, "by": name, "ms": round(ms, 3)} for name, ms in found.items()
            ]
        print(f"| {kind} |", " | ".join(f"{each:.2f}" for each in times), "|", flush=True)
    print("written:", write_report("sampler", vars(args), results))
    return 0


@torch.inference_mode()
def _milliseconds(
    samplers: dict[str, Sampler], num_rows: int, vocab_size: int, params: dict[str, Any], repeats: int
) -> dict[str, float] | None:
    """Median of each sampler, in turns; None if one of them samples other tokens than another."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    token_ids = torch.randint(vocab_size, (num_rows, _PROMPT_TOKENS + _OUTPUT_TOKENS), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in samplers}
    sampled = {}
    rows = {name: _rows(sampler, token_ids.tolist(), params) for name, sampler in samplers.items()}
    for _ in range(repeats + 1):
        for name, sampler in samplers.items():
            fresh = logits.clone()
            start_s = time.perf_counter()
            output = sampler.sample(fresh, rows[name])
            times[name].append(time.perf_counter() - start_s)
            sampled[name] = output.sampled_token_ids
    assert len(sampled["torch"]) == num_rows, "some rows failed"
    if any(each != sampled["torch"] for each in sampled.values()):
        return None
    return {name: 1000 * statistics.median(each[1:]) for name, each in times.items()}


def _rows(sampler: Sampler, token_ids: list[list[int]], params: dict[str, Any]) -> list[RowState]:
    rows = []
    for index, ids in enumerate(token_ids):
        sampling = SamplingParams(max_tokens=10_000, seed=index, **params)
        row = sampler.new_row(index, sampling, _PROMPT_TOKENS)
        row.advance(ids)
        rows.append(row)
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,32", metavar="N,…")
    parser.add_argument("--vocab-size", type=int, default=49_152, metavar="N")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of native kernels; 0: all cores")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="the median is reported")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
