"""Replays a recorded trace (open loop): arrivals and lengths are the trace's, sped up and scaled.

    python -m perf.server.replay [--trace FILE --speeds 0.2,0.4 --target-first-token-ms 0,2000]

Each speed is a separate run. Times count from the moment a request was due. A request is good if it was
served completely, its first token arrived within --slo-ttft-s, and the mean time between its tokens was
at most --slo-itl-s; goodput is good requests per second. Requests that the server refused with UNAVAILABLE
count as refused, not as failed. Each of several targets has a server of its own, one after the other.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common.percentile import percentile
from perf.common.plots import Panel, save_panels
from perf.common.report import ROOT, print_rows, write_report
from perf.server.open_loop import Answer, Arrival, Shape, poisson, run, summarize
from perf.server.serve_process import naiad_serve
from perf.server.traces import Scaling, read_trace, scaled_arrivals

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import ModelConfig
from naiad.errors import ConfigError

_TRACE = ROOT / "perf" / "data" / "azure_llm_2023_conversation_10min.csv"
_PERCENTS = (50, 90, 99)


def main() -> int:
    """Measure, print, plot and write; return 1 if a request failed for another reason than a refusal."""
    parser = _parser()
    args = parser.parse_args()
    try:
        trace = read_trace(args.trace)
    except ConfigError as error:
        parser.error(str(error))
    model_dir = resolve_model(args.model)
    model = ModelConfig.from_directory(model_dir)
    window = int(min(args.window_tokens or math.inf, model.max_position_embeddings))
    runs = []
    for speed in args.speeds:
        scaling = Scaling(speed, args.prompt_scale, args.output_scale, args.start_s, args.duration_s, window)
        runs.append(Run(speed, *scaled_arrivals(trace, scaling, model.vocab_size)))
        if not runs[-1].arrivals:
            parser.error(f"no request of the trace comes in {args.duration_s:g} s at speed {speed:g}")
    options = ["--model", str(model_dir), "--max-num-seqs", str(args.max_num_seqs)]
    options += ["--max-model-len", str(window), "--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    results = []
    for target_ms in args.target_first_token_ms:
        with naiad_serve([*options, "--target-first-token-ms", str(target_ms)]) as server:
            run(server.grpc, poisson(Shape(100.0, 0.1, 16, 8), model.vocab_size, seed=1))
            results += [{"target_ms": target_ms} | _measure(server.grpc, each, args) for each in runs]
    print(
        f"prompts × {args.prompt_scale:g}, outputs × {args.output_scale:g}; good: first token within "
        f"{args.slo_ttft_s:g} s, then on average {args.slo_itl_s:g} s from token to token"
    )
    print_rows(results)
    settings = vars(args) | {"trace": args.trace.name, "model": model_dir.name, "window_tokens": window}
    print("plot:", _plot(results, args), "written:", write_report("replay", settings, results))
    return int(any(row["failed"] for row in results))


@dataclass(frozen=True, slots=True)
class Run:
    """A part of the trace at one speed.

    Attributes:
        speed: 2 = arrivals twice as dense as recorded.
        arrivals: the requests.
        num_clipped: how many of them were clipped to the window.
    """

    speed: float
    arrivals: Sequence[Arrival]
    num_clipped: int


def _measure(url: str, each: Run, args: argparse.Namespace) -> dict[str, Any]:
    row = figures(run(url, each.arrivals), Limits(args.slo_ttft_s, args.slo_itl_s), args.duration_s)
    print(
        f"speed {each.speed:g}: {row['good']} of {len(each.arrivals)} good, {row['refused']} refused",
        flush=True,
    )
    offered = {"speed": each.speed, "offered/s": round(len(each.arrivals) / args.duration_s, 2)}
    return offered | {"clipped": each.num_clipped} | row


@dataclass(frozen=True, slots=True)
class Limits:
    """The latency limits of a good request.

    Attributes:
        first_token_s: time to the first token, from the moment it was due.
        inter_token_s: mean time between tokens.
    """

    first_token_s: float
    inter_token_s: float

    def allow(self, answer: Answer) -> bool:
        """Whether the request was served completely and within the limits."""
        if answer.error or answer.times.first_s is None:
            return False
        inter_s = answer.times.inter_token_s
        is_steady = inter_s is None or inter_s <= self.inter_token_s
        return is_steady and answer.times.first_s <= self.first_token_s


def figures(answers: Sequence[Answer], limits: Limits, duration_s: float) -> dict[str, Any]:
    """Compute counts, percentiles and goodput of a run.

    Args:
        answers: in the order in which the requests were due.
        limits: the limits of a good request.
        duration_s: time over which requests arrive; rates are over this time, or over the time until the
            last answer if that is longer.
    """
    summary = summarize(answers)
    inter = [
        inter_s
        for answer in answers
        if not answer.error and (inter_s := answer.times.inter_token_s) is not None
    ]
    row: dict[str, Any] = {
        "sent": summary.num_sent,
        "served": summary.num_served,
        "refused": summary.num_refused,
        "failed": summary.num_failed,
    }
    for name, values in (("ttft", summary.first_token_s), ("itl", inter)):
        for percent in _PERCENTS:
            row[f"{name}_p{percent}_s"] = round(percentile(values, percent), 3) if values else math.nan
    num_good = sum(limits.allow(answer) for answer in answers)
    seconds = max(duration_s, summary.span_s)
    return row | {
        "tokens/s": round(summary.goodput * summary.span_s / seconds, 1),
        "good": num_good,
        "good/s": round(num_good / seconds, 2),
        "sent_late_p99_s": round(percentile([answer.sent_s for answer in answers], 99), 3),
    }


def _plot(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    offered = [row["offered/s"] for row in results[: len(args.speeds)]]
    rows_of = {
        f", {target_ms} ms" if target_ms else "": [row for row in results if row["target_ms"] == target_ms]
        for target_ms in args.target_first_token_ms
    }
    goodput = {f"good{name}": (offered, [row["good/s"] for row in rows]) for name, rows in rows_of.items()}
    panels = [Panel("offered requests/s", "requests/s", goodput | {"offered": (offered, offered)})]
    for key, limit in (("ttft", args.slo_ttft_s), ("itl", args.slo_itl_s)):
        lines = {
            f"p{percent}{name}": (offered, [row[f"{key}_p{percent}_s"] for row in rows])
            for name, rows in rows_of.items()
            for percent in _PERCENTS
        }
        label = {"ttft": "time to first token, s", "itl": "mean time between tokens, s"}[key]
        panels.append(Panel("offered requests/s", label, lines, ("limit", limit)))
    return save_panels("replay", f"{args.trace.stem}, from the moment a request was due", panels)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--trace", type=Path, default=_TRACE, metavar="FILE", help="Azure .csv, Mooncake .jsonl")
    add("--speeds", type=_factors, default=[0.2, 0.4, 0.6, 0.8], metavar="F,…", help="1 = as recorded")
    add("--prompt-scale", type=_factor, default=0.1, metavar="F", help="factor of prompt lengths")
    add("--output-scale", type=_factor, default=0.1, metavar="F", help="factor of output lengths")
    add("--window-tokens", type=int, default=0, metavar="N", help="maximum length; 0: the model's")
    add("--start-s", type=float, default=30.0, metavar="S", help="start of the replayed part of the trace")
    add("--duration-s", type=_factor, default=40.0, metavar="S", help="time over which requests arrive")
    add("--slo-ttft-s", type=_factor, default=1.0, metavar="S", help="time to first token of a good request")
    add("--slo-itl-s", type=_factor, default=0.25, metavar="S", help="mean time between its later tokens")
    add("--max-num-seqs", type=int, default=32, metavar="N")
    add("--max-num-batched-tokens", type=at_least(0), default=0, metavar="N", help="0: measured at start")
    add(
        "--target-first-token-ms",
        type=_targets,
        default=[0],
        metavar="N,…",
        help="the server's option; each of several has its own server; 0: none",
    )
    return parser


def _factor(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number > 0")
    return value


def _factors(text: str) -> list[float]:
    return [_factor(part) for part in text.split(",")]


def _targets(text: str) -> list[int]:
    return sorted({at_least(0)(part) for part in text.split(",")})


if __name__ == "__main__":
    sys.exit(main())
