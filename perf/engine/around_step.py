"""Shows what a decode step on a CPU spends outside the native kernels, and in which part of the engine.

    python -m perf.engine.around_step --dtype bfloat16 --batch 1,8,32

Figures are medians over steps: processor time of the thread that steps, so that waiting for a core does not
count. A part's time is its own: without that of the parts that it calls, and without the native calls.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from perf.common.report import write_report
from perf.engine.decode_steps import NUM_WARM_UP_STEPS, start_decoding

from naiad.cli.bench.throughput import Prompts, Work, load_engine, random_prompts
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.engine_process import protocol
from naiad.model_runner import paged_model
from naiad.model_runner.paged_model import PagedModel
from naiad.model_runner.sequence_states import SequenceStates
from naiad.models.native_model import NativeModel
from naiad.sampling import sampler
from naiad.sampling.sampler import Sampler
from naiad.scheduler.scheduler import Scheduler
from naiad.sequence import SamplingParams
from naiad_kernels.native.library import Library

_NATIVE = "native calls"
_PARTS: tuple[tuple[str, Any, str], ...] = (
    ("outputs, records of the step", Engine, "step"),
    ("schedule", Scheduler, "schedule"),
    ("update", Scheduler, "update"),
    ("rows and states", SequenceStates, "take"),
    ("inputs, block tables", paged_model, "build_step_inputs"),
    ("launch: checks, context logits", PagedModel, "launch"),
    ("call of the layers", NativeModel, "forward"),
    ("call of the logits", PagedModel, "_start_sampling"),
    ("tokens picked", Sampler, "pick"),
    ("sampling", Sampler, "start"),
    ("how rows draw", sampler, "draws_of"),
    ("results", PagedModel, "_finish"),
    ("gauges of the engine", Engine, "stats"),
    ("message encoded", protocol, "encode_frame"),
    (_NATIVE, Library, "run"),
)


class PartTimes:
    """Measures the own time of each part of a step while it is installed."""

    def __init__(self) -> None:
        """Wrap the parts' functions."""
        self._of_step: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        for part, owner, name in _PARTS:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def take(self) -> dict[str, float]:
        """Return the microseconds of each part since the last call."""
        taken = {part: 1e6 * self._of_step[part] for part, _, _ in _PARTS}
        self._of_step.clear()
        return taken

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = time.thread_time() - start_s
                self._of_step[part] += took_s - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took_s

        return timed


def main() -> int:
    """Measure, print and write the figures."""
    args = _parse()
    batches = [int(part) for part in args.batch.split(",")]
    config = EngineConfig(
        model_dir=str(resolve_model(args.model)),
        dtype=args.dtype,
        max_num_seqs=max(batches),
        cpu_kernels="native",
        enable_prefix_caching=False,
        drafter="none",
    )
    engine, dtype = load_engine(config)
    times = PartTimes()
    results = []
    for batch in batches:
        prompts = random_prompts(Work(batch, args.prompt_tokens, 1), engine.model_config.vocab_size, 0)
        params = SamplingParams(
            max_tokens=2 * NUM_WARM_UP_STEPS + args.steps,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
        )
        results.append({"batch": batch, **measure(engine, prompts, params, args.steps, times)})
    print(f"{'µs a step, batch':<34}" + "".join(f"{batch:>9}" for batch in batches))
    for part in [part for part, _, _ in _PARTS if part != _NATIVE] + ["all"]:
        print(f"{part:<34}" + "".join(f"{each[part]:>9.0f}" for each in results))
    print("written:", write_report("around-step", vars(args) | {"dtype": dtype}, results))
    return 0


def measure(
    engine: Engine, prompts: Prompts, params: SamplingParams, num_steps: int, times: PartTimes
) -> dict[str, float]:
    """Median microseconds of each part of a decode step of these prompts, and of all but the native calls."""
    start_decoding(engine, prompts, params)
    times.take()
    steps = []
    for _ in range(num_steps):
        outputs = engine.step()
        # As an engine process does it for its client.
        protocol.encode_frame(protocol.StepDone(outputs, engine.stats()))
        steps.append(times.take())
    while engine.has_work:
        engine.step()
    medians = {part: statistics.median(step[part] for step in steps) for part, _, _ in _PARTS}
    del medians[_NATIVE]
    medians["all"] = statistics.median(sum(step.values()) - step[_NATIVE] for step in steps)
    return {part: round(each, 1) for part, each in medians.items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", default="1,8,32", metavar="N,…")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="measured steps of each batch")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X")
    parser.add_argument("--top-k", type=int, default=0, metavar="N")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
