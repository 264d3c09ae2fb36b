"""Measures the server under overload, and a quiet tenant beside one that floods the server (open loop).

    python -m perf.server.overload

First the rate is found at which the server is saturated; then requests arrive at half, once, twice
and three times that rate, with a short queue. Finally, a quiet tenant sends a few requests, alone, beside
a tenant with a light load, and beside a tenant that floods the server.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from perf.common.percentile import percentile
from perf.common.report import write_report
from perf.server.open_loop import Shape, Summary, poisson, run, summarize
from perf.server.serve_process import naiad_serve

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import ModelConfig
from naiad.errors import InternalError

_LOADS = (0.5, 1.0, 2.0, 3.0)


def main() -> int:
    """Measure, print and write; return 1 if a request failed for another reason than a full queue."""
    args = _parse()
    model_dir = resolve_model(args.model)
    vocab_size = ModelConfig.from_directory(model_dir).vocab_size
    options = ["--model", str(model_dir), "--max-num-seqs", str(args.max_num_seqs)]
    with naiad_serve([*options, "--max-queued-requests", str(args.max_queued)]) as server:
        rows = _loads(server.grpc, args, vocab_size)
    with naiad_serve(options) as server:
        fair_rows = _tenants(server.grpc, args, vocab_size, rate=rows[0]["saturated_rate"])
    print("written:", write_report("overload", vars(args), rows + fair_rows))
    return int(any(row["failed"] for row in rows + fair_rows))


def _loads(url: str, args: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    saturated_rate = _saturated_rate(url, args, vocab_size)
    print(
        f"saturated at {saturated_rate:.2f} requests/s of {args.prompt_tokens} + {args.output_tokens} tokens"
    )
    header = ("sent", "served", "refused", "failed", "goodput", "ttft p50", "ttft p99", "refused p99")
    print(f"{'load':>6}" + "".join(f"{name:>13}" for name in header))
    rows = []
    for load in _LOADS:
        shape = Shape(load * saturated_rate, args.duration_s, args.prompt_tokens, args.output_tokens)
        summary = summarize(run(url, poisson(shape, vocab_size, seed=int(10 * load))))
        row = {"load": load, "saturated_rate": round(saturated_rate, 3), **_figures(summary)}
        print(
            f"{load:>5}x{row['sent']:>13}{row['served']:>13}{row['refused']:>13}{row['failed']:>13}"
            f"{row['goodput']:>9} t/s{row['ttft_p50_s']:>11} s{row['ttft_p99_s']:>11} s"
            f"{1e3 * row['refusal_p99_s']:>10.1f} ms",
            flush=True,
        )
        rows.append(row)
    peak = max(row["goodput"] for row in rows)
    print(f"goodput at 3x is {rows[-1]['goodput'] / peak:.0%} of its peak")
    return rows


def _saturated_rate(url: str, args: argparse.Namespace, vocab_size: int) -> float:
    """Requests served per second when more requests wait than can run."""
    num_requests = args.max_num_seqs + args.max_queued
    shape = Shape(1000.0, num_requests / 1000.0, args.prompt_tokens, args.output_tokens)
    run(url, poisson(shape, vocab_size, seed=1)[:2])
    arrivals = poisson(shape, vocab_size, seed=2)[:num_requests]
    summary = summarize(run(url, arrivals))
    if summary.num_failed or not summary.num_served:
        raise InternalError(f"{summary.num_failed} requests failed, {summary.num_served} were served")
    return summary.goodput / int(args.output_tokens)


def _tenants(url: str, args: argparse.Namespace, vocab_size: int, rate: float) -> list[dict[str, Any]]:
    rows = []
    for name, load in (("alone", 0.0), ("beside a light tenant", 0.3), ("beside a flood", 3.0)):
        quiet = Shape(0.2 * rate, args.duration_s, args.prompt_tokens, args.output_tokens, "quiet")
        arrivals = poisson(quiet, vocab_size, seed=3)
        if load:
            other = Shape(load * rate, args.duration_s, args.prompt_tokens, args.output_tokens, "other")
            arrivals += poisson(other, vocab_size, seed=4)
        answers = run(url, arrivals)
        summary = summarize([answer for answer in answers if answer.arrival.tenant == "quiet"])
        row = {"tenant": "quiet", "is": name, **_figures(summary)}
        row["failed"] = summarize(answers).num_failed
        print(
            f"quiet tenant {name:<22} ttft p50 {row['ttft_p50_s']} s, p90 {row['ttft_p90_s']} s "
            f"({row['served']} served)",
            flush=True,
        )
        rows.append(row)
    return rows


def _figures(summary: Summary) -> dict[str, Any]:
    first, refusal = summary.first_token_s or [math.nan], summary.refusal_s or [math.nan]
    return {
        "sent": summary.num_sent,
        "served": summary.num_served,
        "refused": summary.num_refused,
        "failed": summary.num_failed,
        "goodput": round(summary.goodput, 1),
        "ttft_p50_s": round(percentile(first, 50), 3),
        "ttft_p90_s": round(percentile(first, 90), 3),
        "ttft_p99_s": round(percentile(first, 99), 3),
        "refusal_p99_s": round(percentile(refusal, 99), 4),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="N")
    parser.add_argument("--max-queued", type=int, default=16, metavar="N", help="--max-queued-requests")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=32, metavar="N")
    parser.add_argument(
        "--duration-s", type=float, default=30.0, metavar="S", help="time over which requests arrive"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
