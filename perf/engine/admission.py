"""Simulates overload with and without a target for the first token: goodput over load, on recorded traces.

    python -m perf.engine.admission [--trace FILE --target-ms 2000]

The engine's own scheduler, KV cache and forecast run on a simulated clock, which each step advances by its
cost: a constant, and a time for each prompt token and each sequence that decodes. A request is good if its
first token comes within the target and its later ones in --slo-itl-s on average. Each load is the same part
of the trace, replayed faster. Load 1 is the one at which most requests a second are good without a target.
A second table has the same requests of two tenants, of which `loud` sends three in four; beside them is how
many requests of `quiet` would be good if it were alone on the machine, and on half of it.
Short prompts are refused less often than long ones, so the good requests' tokens are compared with the peak's
as well.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from perf.common.percentile import percentile
from perf.common.plots import Panel, save_panels
from perf.common.report import ROOT, print_rows, write_report
from perf.server.open_loop import Arrival
from perf.server.traces import Scaling, read_trace, scaled_arrivals

from naiad.cli.argument_types import at_least
from naiad.engine import Engine
from naiad.errors import UnavailableError
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import MemoryUse, ModelOutput, RequestOutput, StepBatch
from naiad.scheduler.policies import PriorityFirst
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import EngineRequest, SamplingParams

_DATA = ROOT / "perf" / "data"
_TRACES = (
    _DATA / "azure_llm_2023_conversation_10min.csv",
    _DATA / "azure_llm_2023_code_10min.csv",
    _DATA / "mooncake_fast25_synthetic.jsonl",
)
_LOADS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_LOADS_OF_TENANTS = (1.0, 2.0, 3.0)
_VOCAB_SIZE = 49152
_BLOCK_SIZE = 64


class StepCost(Protocol):
    """What steps cost."""

    def of(self, step: StepBatch) -> float:
        """The step's seconds."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What a step costs.

    Attributes:
        constant_s: every step.
        prompt_token_s: each token of a prompt.
        decode_row_s: each sequence that decodes.
    """

    constant_s: float
    prompt_token_s: float
    decode_row_s: float

    def of(self, step: StepBatch) -> float:
        """The step's seconds."""
        lengths = [len(row.token_ids) for row in step.rows]
        num_decoding = lengths.count(1)
        num_prompt_tokens = sum(lengths) - num_decoding
        return self.constant_s + num_decoding * self.decode_row_s + num_prompt_tokens * self.prompt_token_s


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What the engine asks about a checkpoint."""

    vocab_size: int = _VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = ()


class SimulatedRunner:
    """Computes nothing, and lets time pass.

    Attributes:
        now_s: the simulated time.
    """

    model_config = SimulatedModel()
    num_late_compiles = 0

    def __init__(self, cost: StepCost, max_model_len: int) -> None:
        """Begin at time 0."""
        self.now_s = 0.0
        self.max_model_len = max_model_len
        self._cost = cost

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        """Let the step's time pass; each sampled token is 7."""
        self.now_s += self._cost.of(step)
        return lambda: ModelOutput({row.sequence_id: [7] for row in step.rows if row.samples})

    def needs_ids(self, params: SamplingParams) -> bool:
        """No row does."""
        return False

    def memory_use(self) -> MemoryUse:
        """Nothing."""
        return MemoryUse()

    def clear_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """No row fails."""
        raise NotImplementedError


@dataclass(slots=True)
class Outcome:
    """A request; times in seconds since it was due."""

    tenant: str
    first_s: float = math.inf
    last_s: float = math.inf
    num_tokens: int = 0
    is_refused: bool = False

    def is_good(self, target_s: float, inter_token_s: float) -> bool:
        """Whether it was served within the limits."""
        pace_s = (self.last_s - self.first_s) / max(1, self.num_tokens - 1)
        return not self.is_refused and self.first_s <= target_s and pace_s <= inter_token_s


def simulate(
    arrivals: Sequence[Arrival],
    cost: StepSeconds,
    *,
    max_num_seqs: int = 32,
    num_blocks: int = 4096,
    step_tokens: int = 1024,
    target_s: float = 0.0,
) -> list[Outcome]:
    """Serve these requests, which must be in the order in which they are due.

    Args:
        arrivals: the requests.
        cost: of steps.
        max_num_seqs: slots.
        num_blocks: blocks of the KV cache, of 64 tokens each.
        step_tokens: maximum tokens of a step.
        target_s: the engine's target for the first token; 0: none.
    """
    runner = SimulatedRunner(cost, num_blocks * _BLOCK_SIZE)
    kv_cache = KVCacheManager(num_blocks, _BLOCK_SIZE, PrefixCache(_BLOCK_SIZE), max_step_tokens=step_tokens)
    scheduler = Scheduler(kv_cache, SchedulerLimits(max_num_seqs, step_tokens), PriorityFirst(aging_s=10.0))
    engine = Engine(scheduler, runner, clock=lambda: runner.now_s, target_first_token_s=target_s)
    outcomes = [Outcome(each.tenant) for each in arrivals]
    num_sent = 0
    while num_sent < len(arrivals) or engine.has_work:
        if not engine.has_work:
            runner.now_s = max(runner.now_s, arrivals[num_sent].due_s)
        while num_sent < len(arrivals) and arrivals[num_sent].due_s <= runner.now_s:
            outcomes[num_sent].is_refused = not _send(engine, num_sent, arrivals[num_sent])
            num_sent += 1
        if engine.has_work:
            for output in engine.step():
                due_s = arrivals[output.sequence_id].due_s
                _take(outcomes[output.sequence_id], output, runner.now_s - due_s)
    return outcomes


def _send(engine: Engine, number: int, arrival: Arrival) -> bool:
    params = SamplingParams(max_tokens=arrival.num_tokens)
    request = EngineRequest(
        sequence_id=number, prompt_token_ids=arrival.prompt_token_ids, params=params, tenant=arrival.tenant
    )
    try:
        engine.add_request(request)
    except UnavailableError:
        return False
    return True


def _take(outcome: Outcome, output: RequestOutput, seconds: float) -> None:
    if output.token_ids:
        outcome.first_s = min(outcome.first_s, seconds)
        outcome.last_s = seconds
        outcome.num_tokens += len(output.token_ids)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a good request is.

    Attributes:
        first_token_s: the most until its first token; also the engine's target, where it has one.
        inter_token_s: the most between its later tokens on average.
    """

    first_token_s: float
    inter_token_s: float

    def num_good(self, outcomes: Sequence[Outcome]) -> int:
        """How many are good."""
        return sum(each.is_good(self.first_token_s, self.inter_token_s) for each in outcomes)


@dataclass(frozen=True, slots=True)
class Trial:
    """A part of a trace, to be replayed at any speed.

    Attributes:
        name: the trace's.
        arrivals: as they were recorded, with scaled lengths.
        seconds: the part's duration as it was recorded.
        cost: of steps.
        step_tokens: maximum tokens of a step.
        goal: what a good request is.
        max_num_seqs: slots.
    """

    name: str
    arrivals: Sequence[Arrival]
    seconds: float
    cost: StepSeconds
    step_tokens: int
    goal: Goal
    max_num_seqs: int = 32

    def at(self, speed: float, *, with_target: bool) -> list[Outcome]:
        """Replay it at this speed."""
        sooner = [replace(each, due_s=each.due_s / speed) for each in self.arrivals]
        target_s = self.goal.first_token_s if with_target else 0.0
        return simulate(
            sooner,
            self.cost,
            max_num_seqs=self.max_num_seqs,
            step_tokens=self.step_tokens,
            target_s=target_s,
        )

    def rate(self, number: int, speed: float) -> float:
        """Requests in a second, if so many came or were good at this speed."""
        return number * speed / self.seconds

    def good_tokens(self, outcomes: Sequence[Outcome]) -> int:
        """Prompt and output tokens of those that are good."""
        return sum(
            len(arrival.prompt_token_ids) + arrival.num_tokens
            for arrival, outcome in zip(self.arrivals, outcomes, strict=True)
            if self.goal.num_good([outcome])
        )

    def peak_speed(self, speeds: Sequence[float]) -> float:
        """The speed at which most requests a second are good without a target."""
        plain = {speed: self.goal.num_good(self.at(speed, with_target=False)) for speed in speeds}
        return max(speeds, key=lambda speed: self.rate(plain[speed], speed))

    def of_tenants(self) -> Trial:
        """The same requests; every fourth is of the tenant `quiet`, the others are of `loud`."""
        arrivals = [
            replace(each, tenant="loud" if number % 4 else "quiet")
            for number, each in enumerate(self.arrivals)
        ]
        return replace(self, arrivals=arrivals)

    def without_loud(self) -> Trial:
        """The requests of `quiet` alone."""
        return replace(self, arrivals=[each for each in self.arrivals if each.tenant == "quiet"])

    def on_half(self) -> Trial:
        """On a machine of half the speed and half the slots, whose steps take as long."""
        cost = self.cost
        slower = StepSeconds(cost.constant_s, 2 * cost.prompt_token_s, 2 * cost.decode_row_s)
        slots = self.max_num_seqs // 2
        return replace(self, cost=slower, step_tokens=self.step_tokens // 2, max_num_seqs=slots)


def main() -> int:
    """Simulate, print, plot and write."""
    args = _parse()
    rows: list[dict[str, Any]] = []
    tenant_rows: list[dict[str, Any]] = []
    panels = []
    for path in args.trace or _TRACES:
        trial = _trial(path, args)
        peak = trial.peak_speed([args.first_speed * 1.25**step for step in range(args.num_speeds)])
        found = load_rows(trial, peak)
        rows += found
        tenant_rows += share_rows(trial.of_tenants(), peak)
        loads = [row["load"] for row in found]
        lines = {
            name: (loads, [row[name] for row in found]) for name in ("offered/s", "good/s", "good/s, target")
        }
        panels.append(Panel(f"load, {trial.name}", "requests/s", lines))
    print(f"good: first token within {args.target_ms} ms, the others every {args.slo_itl_s:g} s on average")
    print_rows(rows)
    print("quiet sends one request in four:")
    print_rows(tenant_rows)
    plot = save_panels("admission", f"good: first token within {args.target_ms} ms", panels)
    settings = vars(args) | {"trace": [each.name for each in args.trace or _TRACES]}
    print("plot:", plot, "written:", write_report("admission", settings, rows + tenant_rows))
    return 0


def load_rows(trial: Trial, peak: float) -> list[dict[str, Any]]:
    """Figures with and without a target, a row for each load; `peak` is the speed of load 1."""
    target_s = trial.goal.first_token_s
    at_peak = trial.at(peak, with_target=False)
    num_at_peak, tokens_at_peak = trial.goal.num_good(at_peak), trial.good_tokens(at_peak)
    rows = []
    for load in _LOADS:
        speed = peak * load
        num_good = trial.goal.num_good(trial.at(speed, with_target=False))
        with_target = trial.at(speed, with_target=True)
        num_with = trial.goal.num_good(with_target)
        served = [each.first_s for each in with_target if not each.is_refused]
        rows.append(
            {
                "trace": trial.name,
                "load": load,
                "offered/s": round(trial.rate(len(with_target), speed), 2),
                "good/s": round(trial.rate(num_good, speed), 2),
                "good/s, target": round(trial.rate(num_with, speed), 2),
                "of the peak": round(num_with * load / num_at_peak, 2),
                "of its tokens": round(trial.good_tokens(with_target) * load / tokens_at_peak, 2),
                "refused": sum(each.is_refused for each in with_target),
                "late": sum(each > target_s for each in served),
                "ttft p95 s": round(percentile(served, 95), 2),
            }
        )
    return rows


def share_rows(trial: Trial, peak: float) -> list[dict[str, Any]]:
    """Each tenant's good requests and its share of all good ones, a row for each load, with and without."""
    alone = trial.without_loud()
    rows = []
    for load in _LOADS_OF_TENANTS:
        for with_target in (False, True):
            outcomes = trial.at(peak * load, with_target=with_target)
            row: dict[str, Any] = {"trace": trial.name, "load": load, "target": with_target}
            num_good = max(1, trial.goal.num_good(outcomes))
            for tenant in ("quiet", "loud"):
                own = [each for each in outcomes if each.tenant == tenant]
                num_own = trial.goal.num_good(own)
                row |= {
                    f"{tenant} sent": len(own),
                    f"{tenant} good": num_own,
                    f"{tenant} share": round(num_own / num_good, 2),
                }
            for name, reference in (("alone", alone), ("on half", alone.on_half())):
                made = reference.at(peak * load, with_target=with_target)
                row[f"quiet {name}"] = trial.goal.num_good(made)
            rows.append(row)
    return rows


def _trial(path: Path, args: argparse.Namespace) -> Trial:
    scaling = Scaling(1.0, args.prompt_scale, args.output_scale, 0.0, args.part_s, args.window_tokens)
    arrivals, _ = scaled_arrivals(read_trace(path), scaling, _VOCAB_SIZE)
    cost = StepSeconds(args.step_ms / 1e3, args.prompt_token_ms / 1e3, args.decode_row_ms / 1e3)
    return Trial(
        "_".join(path.stem.split("_")[:4]),
        sorted(arrivals, key=lambda each: each.due_s),
        args.part_s,
        cost,
        args.step_tokens,
        Goal(args.target_ms / 1e3, args.slo_itl_s),
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--trace", type=Path, action="append", metavar="FILE", help="Azure .csv, Mooncake .jsonl")
    add("--target-ms", type=at_least(1), default=2000, metavar="N")
    add(
        "--slo-itl-s", type=float, default=0.25, metavar="S", help="mean time between a good request's tokens"
    )
    add("--step-ms", type=float, default=4.0, metavar="MS", help="constant cost of a step")
    add("--prompt-token-ms", type=float, default=0.25, metavar="MS")
    add("--decode-row-ms", type=float, default=0.6, metavar="MS")
    add("--step-tokens", type=at_least(1), default=512, metavar="N", help="maximum tokens of a step")
    add("--prompt-scale", type=float, default=0.5, metavar="F", help="factor of prompt lengths")
    add("--output-scale", type=float, default=0.5, metavar="F", help="factor of output lengths")
    add("--window-tokens", type=at_least(2), default=8192, metavar="N", help="maximum length")
    add("--part-s", type=float, default=300.0, metavar="S", help="the part of the trace, from its start")
    add("--first-speed", type=float, default=0.1, metavar="F", help="the slowest that is tried for the peak")
    add("--num-speeds", type=at_least(1), default=16, metavar="N", help="each is 1.25 times the one before")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
