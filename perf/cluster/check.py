"""Compares what the simulation of replicas predicts with what real servers do.

    python -m perf.cluster.check [--replicas 1,3 --loads 0.6,1.0,1.4 --policies round_robin]

First the steps of one engine are measured, as by `perf.cluster.measure`. Then the same requests go to servers
and to the simulation, both by the simulation's own routers. Up to --computing replicas compute. More do not
fit on a small machine: those servers are real but for the model, whose steps sleep for as long as they were
measured to take. A machine's speed changes, and servers and client share its processors: so a replica that
computes is measured again through its server, before and after each row, and its simulation gets the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import grpc
from perf.cluster import measure
from perf.cluster.arrivals import Lengths, Request, dense_requests, with_other_tokens
from perf.cluster.replica_spec import ReplicaSpec, read_spec
from perf.cluster.routers import POLICIES, Router
from perf.cluster.served_costs import mean_costs, served_costs
from perf.cluster.simulate import DATA, counts, loads
from perf.cluster.simulation import End, Simulation
from perf.common.percentile import percentile
from perf.common.report import ROOT, print_rows, write_report
from perf.common.token_times import TokenTimes
from perf.server.load import arrays, llm_inputs, stream_messages
from perf.server.serve_process import Served, naiad_serve
from perf.server.traces import read_trace

from naiad.cli.argument_types import above_0, at_least
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.errors import InternalError

_MODEL = """from perf.cluster.sleeping_engine import sleeping_llm_model

TritonPythonModel = sleeping_llm_model({costs!r})
"""
# What a router knows of a server's cache comes by events, which this client does not read.
_POLICIES = [name for name, router in POLICIES.items() if not router.wants_changes]
_HITS = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{.*\} (\S+)$", re.M)


def main() -> int:
    """Measure, serve, simulate, print and write; return 1 if a prediction is too far off."""
    args = _parse()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as name:
        spec, costs = _measured(Path(name) / "costs.json", args)
        for num_replicas in args.replicas:
            with _servers(num_replicas, Path(name), costs, spec, args) as servers:
                for load, policy in product(args.loads, args.policies):
                    # No cache knows the prompts of an earlier turn.
                    requests = with_other_tokens(_requests(load, num_replicas, spec, args), len(rows))
                    row = {"replicas": num_replicas, "computes": num_replicas <= args.computing}
                    row |= {"policy": policy, "load": load}
                    rows.append(row | _compared(policy, servers, requests, spec, args, len(rows)))
                    print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print_rows(rows)
    settings = {name: str(value) for name, value in vars(args).items()}
    settings |= {"trace": args.trace.name, "costs": "" if args.costs is None else args.costs.name}
    settings |= {"model": resolve_model(args.model).name, "replica": spec.measured}
    print("written:", write_report("cluster-check", settings, rows))
    off = max(abs(row["goodput, ratio"] - 1) for row in rows)
    print(f"goodput is at most {100 * off:.0f} % off")
    return int(off > args.most_off)


def _requests(load: float, num_replicas: int, spec: ReplicaSpec, args: argparse.Namespace) -> list[Request]:
    lengths = Lengths(args.prompt_scale, args.output_scale, min(args.window_tokens, spec.max_model_len))
    return dense_requests(read_trace(args.trace), load * args.rate * num_replicas, args.duration_s, lengths)


def _measured(path: Path, args: argparse.Namespace) -> tuple[ReplicaSpec, Path]:
    if args.costs is not None:
        shutil.copyfile(args.costs, path)
    else:
        seqs = ["--max-num-seqs", str(args.max_num_seqs)]
        measure.main(["--output", str(path), "--model", args.model, *seqs])
    return read_spec(path), path


@contextlib.contextmanager
def _servers(
    num_replicas: int, folder: Path, costs: Path, spec: ReplicaSpec, args: argparse.Namespace
) -> Iterator[list[Served]]:
    options = ["--model", str(resolve_model(args.model)), "--max-num-seqs", str(spec.max_num_seqs)]
    options += ["--max-queued-requests", str(spec.max_queued_requests), "--drafter", "none"]
    options += ["--max-model-len", str(min(args.window_tokens, spec.max_model_len))]
    environment = {}
    if num_replicas > args.computing:
        repository = folder / "repository"
        shutil.copytree(ROOT / "model_repository", repository, dirs_exist_ok=True)
        (repository / "llm" / "1" / "model.py").write_text(_MODEL.format(costs=str(costs)))
        options += ["--model-repository", str(repository)]
        environment = {"PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(naiad_serve(options, environment)) for _ in range(num_replicas)]


def _compared(
    policy: str,
    servers: Sequence[Served],
    requests: Sequence[Request],
    spec: ReplicaSpec,
    args: argparse.Namespace,
    turn: int,
) -> dict[str, Any]:
    computes = len(servers) <= args.computing
    before_costs = served_costs(servers[0], spec, 2 * turn) if computes else spec
    before = _cache_counts(servers)
    router = _router(policy, servers, spec, args)
    answers = asyncio.run(_served(servers, router, requests))
    seen = _figures([(each.first_s or 0.0, each.inter_token_s or 0.0) for each in answers], args)
    hits, queries = (now - then for now, then in zip(_cache_counts(servers), before, strict=True))
    seen["hit rate"] = hits / max(1.0, queries)
    if computes:
        spec = mean_costs(before_costs, served_costs(servers[0], spec, 2 * turn + 1))
    simulation = Simulation(spec, _router(policy, servers, spec, args), requests)
    simulation.run()
    ended = [each for each in simulation.outcomes if each.end is End.SERVED]
    said = _figures([(each.first_s, each.inter_token_s) for each in ended], args)
    totals = simulation.totals
    said["hit rate"] = totals.num_hit_tokens / max(1, totals.num_queried_tokens)
    row: dict[str, Any] = {"offered/s": round(len(requests) / args.duration_s, 2)}
    row |= {"step of 8 ms": round(1e3 * spec.costs.decode_s(8, 0), 1)}
    row |= {"prompt token ms": round(1e3 * spec.prompt_token_s, 3)}
    for name, value in seen.items():
        row |= {f"{name}, seen": round(value, 3), f"{name}, predicted": round(said[name], 3)}
        row[f"{name}, ratio"] = round(ratio(said[name], value), 3)
    return row


def ratio(predicted: float, seen: float) -> float:
    """How often what was predicted contains what was seen: 1 if both are 0, and infinite if only this is."""
    if seen:
        return predicted / seen
    return math.inf if predicted else 1.0


def _router(policy: str, servers: Sequence[Served], spec: ReplicaSpec, args: argparse.Namespace) -> Router:
    return POLICIES[policy](len(servers), args.seed, spec.block_size)


def _figures(served: Sequence[tuple[float, float]], args: argparse.Namespace) -> dict[str, float]:
    """Figures of requests that were served: (seconds to the first token, between tokens) of each."""
    first_s = [first for first, _ in served]
    num_good = sum(first <= args.slo_ttft_s and inter <= args.slo_itl_s for first, inter in served)
    return {
        "goodput": num_good / args.duration_s,
        "TTFT p50 s": percentile(first_s, 50),
        "TTFT p95 s": percentile(first_s, 95),
        "ITL p50 ms": 1e3 * percentile([inter for _, inter in served], 50),
    }


async def _served(servers: Sequence[Served], router: Router, requests: Sequence[Request]) -> list[TokenTimes]:
    """Send every request when it is due to the server that the router chooses; times of those served."""
    channels = [grpc.aio.insecure_channel(server.grpc) for server in servers]
    began_s = time.perf_counter()

    async def one(request: Request) -> list[tuple[float, bytes]]:
        await asyncio.sleep(max(0.0, began_s + request.due_s - time.perf_counter()))
        index = router.choose(request.prompt)
        router.send(index)
        try:
            inputs = llm_inputs(list(request.prompt), request.num_tokens)
            return await stream_messages(channels[index], "llm", inputs, began_s + request.due_s)
        finally:
            router.end(index)

    try:
        answers = await asyncio.gather(*(one(each) for each in requests))
    finally:
        for channel in channels:
            await channel.close()
    # Read only now: a client that works takes processor time from the servers.
    times = [_times(messages, each) for messages, each in zip(answers, requests, strict=True)]
    return [each for each in times if each is not None]


def _times(messages: Sequence[tuple[float, bytes]], request: Request) -> TokenTimes | None:
    """The times of a request's tokens; None if it was refused because the queue was full."""
    times = TokenTimes()
    try:
        for at_s, message in messages:
            for ids in arrays([message], "output_ids"):
                times.take(ids.size, at_s)
    except InternalError as error:
        if "queue is full" in str(error):
            return None
        raise
    if times.num_tokens != request.num_tokens:
        raise InternalError(f"{times.num_tokens} tokens instead of {request.num_tokens}")
    return times


def _cache_counts(servers: Sequence[Served]) -> tuple[float, float]:
    """Prompt tokens that were found in the servers' prefix caches, and looked up there."""
    totals = {"hits": 0.0, "queries": 0.0}
    for server in servers:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as answer:
            for name, value in _HITS.findall(answer.read().decode()):
                totals[name] += float(value)
    return totals["hits"], totals["queries"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add("--costs", type=Path, metavar="FILE", help="of perf.cluster.measure (default: measured first)")
    add("--max-num-seqs", type=at_least(1), default=32, metavar="N", help="slots of a replica")
    trace = DATA / "mooncake_fast25_synthetic.jsonl"
    add("--trace", type=Path, default=trace, metavar="FILE", help="Azure .csv, Mooncake .jsonl")
    add("--replicas", type=counts, default=[1, 3], metavar="N,…")
    add(
        "--computing",
        type=at_least(0),
        default=1,
        metavar="N",
        help="up to so many replicas compute; the steps of the first stand for all",
    )
    add("--policies", nargs="+", choices=_POLICIES, default=["round_robin", "prefix_hash"])
    add("--loads", type=loads, default=[0.6, 1.0, 1.4], metavar="F,…")
    add("--rate", type=above_0, default=1.0, metavar="R", help="requests/s for each replica at load 1")
    add("--duration-s", type=above_0, default=60.0, metavar="S", help="time over which requests come")
    add("--slo-ttft-s", type=above_0, default=2.0, metavar="S")
    add("--slo-itl-s", type=above_0, default=0.25, metavar="S")
    add("--prompt-scale", type=above_0, default=0.1, metavar="F", help="factor of prompt lengths")
    add("--output-scale", type=above_0, default=0.25, metavar="F", help="factor of output lengths")
    add("--window-tokens", type=at_least(2), default=8192, metavar="N", help="maximum length")
    add("--most-off", type=above_0, default=0.15, metavar="F", help="how far off goodput may be")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of the routers' choices")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
