"""Measures what a replica's steps cost on this CPU, for `perf.cluster.simulate`.

    python -m perf.cluster.measure --output perf/data/step_costs.json

Steps are timed as `naiad plan --cpu` does it: in processor time, each the best of several.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from perf.cluster.replica_spec import ReplicaSpec

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import machine
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.plan.measure import measured_costs
from naiad.config import EngineConfig
from naiad.config.engine_config import CPU_QUANTIZATIONS, DTYPES


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write."""
    args = _parse(argv)
    config = EngineConfig(
        model_dir=str(resolve_model(args.model)),
        dtype=args.dtype,
        quantization=args.quantization,
        max_num_seqs=args.max_num_seqs,
        kv_cache_bytes=args.kv_cache_bytes,
        drafter="none",
    )
    costs, runner = measured_costs(config, args.max_num_seqs)
    budget = runner.token_budget
    spec = ReplicaSpec(
        decode=tuple(costs.decode),
        short_context=costs.short_context,
        context_s=costs.context_s,
        prompt_token_s=costs.prompt_token_s,
        pair_s=costs.pair_s,
        overhead_s=args.overhead_ms / 1e3,
        max_num_seqs=args.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        step_tokens=max(budget.num_tokens, args.max_num_seqs),
        context_cost=budget.context_cost,
        decode_cost=budget.decode_cost,
        measured=f"{args.model}, {runner.dtype}, {args.quantization}, {machine()['cpu']}",
    )
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(spec)) + b"\n")
    print(f"written: {args.output}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE")
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--dtype", choices=DTYPES, default="auto")
    add("--quantization", choices=CPU_QUANTIZATIONS, default="none")
    add("--max-num-seqs", type=at_least(1), default=32, metavar="N")
    add("--kv-cache-bytes", type=at_least(0), default=1 << 30, metavar="N", help="0: as at a start")
    add("--overhead-ms", type=float, default=0.3, metavar="MS", help="of the engine around each step")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
