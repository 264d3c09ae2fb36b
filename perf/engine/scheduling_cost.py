"""Measures the cost of scheduling: `schedule` and `update` at steady decode, without a model.

    python -m perf.engine.scheduling_cost

Figures are medians over steps of a batch that only decodes, with the prefix cache on. Blocks are filled
and published as in service.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from perf.common.report import plot_path, write_report

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import ModelOutput
from naiad.scheduler.policies import PriorityFirst
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import SamplingParams, Sequence
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost

_BLOCK_SIZE = 64
_PROMPT_TOKENS = 100
_NUM_WARM_UP_STEPS = 40


def main() -> int:
    """Measure, print and write the figures and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", default="1,4,16,64,256,1024", metavar="N,…")
    parser.add_argument(
        "--steps", type=int, default=300, metavar="N", help="measured steps; the median is reported"
    )
    args = parser.parse_args()
    results = [measure(int(part), args.steps) for part in args.running.split(",")]
    print(f"{'running':>8}{'schedule':>12}{'update':>12}{'both':>12}{'a sequence':>12}")
    for each in results:
        both = each["schedule_ms"] + each["update_ms"]
        print(
            f"{each['running']:>8}{each['schedule_ms']:>9.3f} ms{each['update_ms']:>9.3f} ms{both:>9.3f} ms"
            f"{1e3 * both / each['running']:>9.2f} µs"
        )
    print("written:", write_report("scheduling-cost", vars(args), results), _plot(results))
    return 0


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Median milliseconds of `schedule` and of `update`."""
    scheduler = _running(num_running)
    schedule_s, update_s = [], []
    for index in range(_NUM_WARM_UP_STEPS + num_steps):
        start_s = time.perf_counter()
        step = scheduler.schedule()
        middle_s = time.perf_counter()
        assert len(step.rows) == num_running
        result = ModelOutput({row.sequence_id: [7] for row in step.rows if row.samples})
        end_s = time.perf_counter()
        scheduler.update(step, result)
        if index >= _NUM_WARM_UP_STEPS:
            schedule_s.append(middle_s - start_s)
            update_s.append(time.perf_counter() - end_s)
    return {
        "running": num_running,
        "schedule_ms": round(1e3 * statistics.median(schedule_s), 4),
        "update_ms": round(1e3 * statistics.median(update_s), 4),
    }


def _running(num_running: int) -> Scheduler:
    kv_cache = KVCacheManager(num_running * 20, _BLOCK_SIZE, PrefixCache(_BLOCK_SIZE))
    limits = SchedulerLimits(num_running, num_running * (_PROMPT_TOKENS + _BLOCK_SIZE))
    # As in service without a drafter, where only clients' own drafts are tried.
    speculator = Speculator(None, SpeculationPolicy(StepCost([(1, 1.0)])), 8)
    scheduler = Scheduler(kv_cache, limits, PriorityFirst(aging_s=10.0), speculator)
    for number in range(num_running):
        # Lengths differ, so that blocks do not all become full in the same step.
        num_tokens = _PROMPT_TOKENS + number % _BLOCK_SIZE
        params = SamplingParams(max_tokens=1 << 20)
        scheduler.add(Sequence(number, [number + 1] * num_tokens, num_tokens, params, float(number)))
    return scheduler


def _plot(results: list[dict[str, float]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    running = [each["running"] for each in results]
    axes.plot(
        running, [each["schedule_ms"] + each["update_ms"] for each in results], marker="o", label="both"
    )
    axes.plot(running, [each["update_ms"] for each in results], marker=".", label="update")
    axes.set(xscale="log", yscale="log", xlabel="running sequences", ylabel="ms per step")
    axes.set_title("schedule + update at steady decode")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    path = plot_path("scheduling-cost")
    figure.savefig(path, dpi=120)
    return str(path.name)


if __name__ == "__main__":
    sys.exit(main())
