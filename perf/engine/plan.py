"""Compares what `naiad plan --cpu` predicts with what the engine does with requests that come at random.

    python -m perf.engine.plan

Steps are measured as `naiad plan` does it; then the engine, in this process, serves requests of one length at
several shares of the rate that the plan calls the most.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perf.common.report import print_rows, write_report

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.plan.load import Latency, Limits, Load, latency, most_per_s
from naiad.cli.plan.measure import measured_costs
from naiad.config import EngineConfig
from naiad.config.engine_config import DTYPES
from naiad.engine import Engine, build_engine
from naiad.sequence import EngineRequest, SamplingParams

_WARM_UP_S = 5.0


@dataclass(slots=True)
class Seen:
    """A request; times on one clock."""

    due_s: float
    first_s: float = 0.0
    last_s: float = 0.0


def main() -> int:
    """Measure, print and write."""
    args = _parse()
    config = EngineConfig(
        model_dir=str(resolve_model(args.model)),
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        drafter="none",
        enable_prefix_caching=False,
    )
    costs, _ = measured_costs(config, args.max_num_seqs)
    most = most_per_s(costs, Load(1.0, args.prompt, args.output), args.max_num_seqs, Limits())
    engine = build_engine(config)
    _serve(engine, most / 2, args, _WARM_UP_S)
    rows = []
    for share in args.shares:
        expected = latency(costs, Load(share * most, args.prompt, args.output), args.max_num_seqs)
        assert expected is not None
        seen = _serve(engine, share * most, args, args.seconds)
        rows.append({"of the most": share} | _row(seen, expected, args.output))
    print(f"most: {most:.2f} requests/s of {args.prompt} + {args.output} tokens")
    print_rows(rows)
    print("written:", write_report("plan", vars(args) | {"most_per_s": round(most, 3)}, rows))
    return 0


def _serve(engine: Engine, per_s: float, args: argparse.Namespace, seconds: float) -> list[Seen]:
    """Let requests come for so many seconds, and serve all of them."""
    draw, due_s = random.Random(f"{per_s}"), 0.0
    waiting: list[float] = []
    while (due_s := due_s + draw.expovariate(per_s)) < seconds:
        waiting.append(due_s)
    seen: list[Seen] = []
    start_s = time.perf_counter()
    params = SamplingParams(max_tokens=args.output)
    while waiting or engine.has_work:
        now_s = time.perf_counter() - start_s
        while waiting and waiting[0] <= now_s:
            prompt = [draw.randrange(100, engine.model_config.vocab_size) for _ in range(args.prompt)]
            engine.add_request(EngineRequest(sequence_id=len(seen), prompt_token_ids=prompt, params=params))
            seen.append(Seen(waiting.pop(0)))
        if not engine.has_work:
            time.sleep(max(0.0, waiting[0] - now_s))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - start_s
        for output in outputs:
            if output.token_ids:
                request = seen[output.sequence_id]
                request.first_s = request.first_s or now_s
                request.last_s = now_s
    return seen


def _row(seen: Sequence[Seen], expected: Latency, num_tokens: int) -> dict[str, Any]:
    first_s = sum(each.first_s - each.due_s for each in seen) / len(seen)
    inter_s = sum((each.last_s - each.first_s) / (num_tokens - 1) for each in seen) / len(seen)
    return {
        "served": len(seen),
        "running, plan": round(expected.running, 1),
        "ITL ms, plan": round(1e3 * expected.inter_token_s, 2),
        "ITL ms": round(1e3 * inter_s, 2),
        "ITL, plan / seen": round(expected.inter_token_s / inter_s, 2),
        "TTFT ms, plan": round(1e3 * expected.first_token_s, 1),
        "TTFT ms": round(1e3 * first_s, 1),
        "TTFT, plan / seen": round(expected.first_token_s / first_s, 2),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--dtype", choices=DTYPES, default="auto")
    add("--prompt", type=at_least(1), default=200, metavar="N", help="tokens of a prompt")
    add("--output", type=at_least(2), default=64, metavar="N", help="tokens of an answer")
    add("--max-num-seqs", type=at_least(1), default=32, metavar="N")
    add("--seconds", type=float, default=30.0, metavar="S", help="for which requests come")
    add("--shares", type=_shares, default=[0.25, 0.5, 0.75], metavar="F,…", help="of the most requests/s")
    return parser.parse_args()


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
