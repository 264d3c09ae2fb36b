"""Simulates replicas behind a router: goodput over load and over replicas, by the router's policy.

    python -m perf.cluster.simulate [--replicas 1,3,9 --loads 0.5,1,1.5 --kill-at-s 40]

Each replica is the engine's own scheduler, KV cache and prefix cache on a simulated clock, whose steps take
as long as steps took on one (`perf.cluster.measure`). Load 1 is --rate requests a second for each replica. A
request is good if its first token comes within --slo-ttft-s and its later ones in --slo-itl-s on average.
Equal options give equal figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf.cluster.arrivals import Lengths, Request, dense_requests
from perf.cluster.replica_spec import ReplicaSpec, read_spec
from perf.cluster.routers import POLICIES
from perf.cluster.simulation import End, Failure, Simulation
from perf.common.percentile import percentile
from perf.common.plots import Panel, save_panels
from perf.common.report import ROOT, print_rows, write_report
from perf.server.traces import read_trace

from naiad.cli.argument_types import above_0, at_least

DATA = ROOT / "perf" / "data"
_NAN = float("nan")


def main() -> int:
    """Simulate, print, plot and write."""
    args = _parse()
    spec = read_spec(args.costs)
    trace = read_trace(args.trace)
    window_tokens = min(args.window_tokens, spec.max_model_len)
    lengths = Lengths(args.prompt_scale, args.output_scale, window_tokens)
    rows = []
    for num_replicas in args.replicas:
        for load in args.loads:
            per_s = load * args.rate * num_replicas
            requests = dense_requests(trace, per_s, args.duration_s, lengths)
            for policy in args.policies:
                rows.append(_row(policy, num_replicas, load, requests, spec, args))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print_rows(rows)
    plot = save_panels("cluster", f"{args.trace.stem}, replicas as measured", _panels(rows, args))
    settings = vars(args) | {"trace": args.trace.name, "costs": args.costs.name, "replica": spec.measured}
    print("plot:", plot, "written:", write_report("cluster", settings, rows))
    return 0


def _row(
    policy: str,
    num_replicas: int,
    load: float,
    requests: Sequence[Request],
    spec: ReplicaSpec,
    args: argparse.Namespace,
) -> dict[str, Any]:
    failures = [] if args.kill_at_s is None else [Failure(0, args.kill_at_s, args.down_s)]
    router = POLICIES[policy](num_replicas, args.seed, spec.block_size)
    simulation = Simulation(spec, router, requests, failures)
    simulation.run()
    outcomes, totals = simulation.outcomes, simulation.totals
    served = [each for each in outcomes if each.end is End.SERVED]
    num_good = sum(each.is_good(args.slo_ttft_s, args.slo_itl_s) for each in outcomes)
    first_s = [each.first_s for each in served] or [_NAN]
    inter_s = [each.inter_token_s for each in served] or [_NAN]
    return {
        "policy": policy,
        "replicas": num_replicas,
        "load": load,
        "offered/s": round(len(outcomes) / args.duration_s, 2),
        "good/s": round(num_good / args.duration_s, 2),
        "good/s of a replica": round(num_good / args.duration_s / num_replicas, 3),
        "ttft p50 s": round(percentile(first_s, 50), 3),
        "ttft p95 s": round(percentile(first_s, 95), 3),
        "itl p95 ms": round(1e3 * percentile(inter_s, 95), 1),
        "hit rate": round(totals.num_hit_tokens / max(1, totals.num_queried_tokens), 3),
        "busy": round(totals.busy_s / simulation.now_s / num_replicas, 3),
        "sent again": sum(each.num_attempts > 1 for each in outcomes),
        "failed": sum(each.end is End.FAILED for each in outcomes),
        "refused": sum(each.end is End.REFUSED for each in outcomes),
    }


def _panels(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[Panel]:
    most, heaviest = max(args.replicas), max(args.loads)

    def lines(x: str, y: str, is_shown: Callable[[dict[str, Any]], bool]) -> Any:
        shown = [row for row in rows if is_shown(row)]
        return {
            policy: tuple(zip(*((row[x], row[y]) for row in shown if row["policy"] == policy), strict=True))
            for policy in args.policies
        }

    def at_most(row: dict[str, Any]) -> bool:
        return bool(row["replicas"] == most)

    def at_heaviest(row: dict[str, Any]) -> bool:
        return bool(row["load"] == heaviest)

    return [
        Panel(f"load of {most} replicas", "good requests/s", lines("load", "good/s", at_most)),
        Panel(f"load of {most} replicas", "prefix hit rate", lines("load", "hit rate", at_most)),
        Panel(
            f"replicas, load {heaviest:g}",
            "good requests/s of a replica",
            lines("replicas", "good/s of a replica", at_heaviest),
        ),
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--costs",
        type=Path,
        default=DATA / "step_costs.json",
        metavar="FILE",
        help="what perf.cluster.measure has written",
    )
    add(
        "--trace",
        type=Path,
        default=DATA / "mooncake_fast25_synthetic.jsonl",
        metavar="FILE",
        help="Azure .csv, Mooncake .jsonl",
    )
    add("--replicas", type=counts, default=[1, 3], metavar="N,…")
    add("--policies", type=_policies, default=list(POLICIES), metavar="NAME,…", help=", ".join(POLICIES))
    add("--loads", type=loads, default=[0.5, 0.75, 1.0, 1.25, 1.5], metavar="F,…")
    add("--rate", type=above_0, default=1.0, metavar="R", help="requests/s for each replica at load 1")
    add("--duration-s", type=above_0, default=600.0, metavar="S", help="time over which requests come")
    add("--kill-at-s", type=above_0, metavar="S", help="replica 0 dies then (default: none does)")
    add("--down-s", type=above_0, default=20.0, metavar="S", help="until it is back, with an empty cache")
    add("--slo-ttft-s", type=above_0, default=2.0, metavar="S")
    add("--slo-itl-s", type=above_0, default=0.25, metavar="S")
    add("--prompt-scale", type=above_0, default=0.1, metavar="F", help="factor of prompt lengths")
    add("--output-scale", type=above_0, default=0.25, metavar="F", help="factor of output lengths")
    add("--window-tokens", type=at_least(2), default=8192, metavar="N", help="maximum length")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of the routers' choices")
    return parser.parse_args()


def counts(text: str) -> list[int]:
    """Read an option that is a list of counts."""
    return [at_least(1)(part) for part in text.split(",")]


def loads(text: str) -> list[float]:
    """Read an option that is a list of loads."""
    return [above_0(part) for part in text.split(",")]


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r}: expected some of {', '.join(POLICIES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
