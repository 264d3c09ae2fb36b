from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernel_interpreter import Interpret
from kernels_on_cpu import kernels_on_cpu

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.model_runner import ModelRunner
from naiad.model_runner.graph_buckets import Buckets
from naiad.outputs import ModelOutput, StepBatch
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import EngineRequest, SamplingParams

BLOCK = 16


class CountingRunner(ModelRunner):
    """Counts steps, steps launched while another was in flight, and replays of graphs."""

    num_steps = 0
    num_overlapped = 0
    num_replayed = 0

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        self.num_steps += 1
        self.num_overlapped += step.is_projected
        return super().launch(step)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Stand in for a CUDA graph: repeat the computation."""

        def replay() -> None:
            self.num_replayed += 1
            compute()

        return replay


def generate(directory: Path, overlaps: bool, has_graphs: bool) -> tuple[dict[int, list[int]], list[int]]:
    """The ids of three sequences, one of which stops in the middle, and the counts."""
    config = EngineConfig(
        cpu_kernels="torch",
        model_dir=str(directory),
        dtype="float32",
        block_size=BLOCK,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    )
    runner = CountingRunner(config)
    kv_cache = KVCacheManager(runner.num_blocks, BLOCK)
    engine = Engine(Scheduler(kv_cache, SchedulerLimits(4, 32)), runner, overlaps=overlaps)
    tokens: dict[int, list[int]] = {number: [] for number in range(3)}
    with kernels_on_cpu():
        if has_graphs:
            runner.capture_graphs(Buckets((1, 3), (1,), (64,)), runner.capture)
        for number in tokens:
            params = SamplingParams(
                max_tokens=2 + number,
                temperature=0.9 * (number > 0),
                top_p=0.9 if number == 1 else 1.0,
                seed=number,
                stop_token_ids=tuple(range(60, 80)) if number == 2 else (),
            )
            prompt = [(7 * number + 3 * place) % 90 for place in range(3 + 9 * number)]
            engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))
        while engine.has_work:
            for output in engine.step():
                tokens[output.sequence_id] += output.token_ids
    return tokens, [runner.num_steps, runner.num_overlapped, runner.num_replayed]


def test_ids_that_stay_on_the_device_are_the_next_steps_inputs(interpret: Interpret, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    expected, (_, num_overlapped, num_replayed) = interpret(generate, tmp_path, False, False)
    assert (num_overlapped, num_replayed) == (0, 0)
    assert [len(each) for each in expected.values()] == [2, 3, 2], "the last one stops early"
    for has_graphs in (False, True):
        tokens, (num_steps, num_overlapped, num_replayed) = interpret(generate, tmp_path, True, has_graphs)
        assert tokens == expected
        assert num_overlapped == num_steps - 1
        assert (num_replayed > 0) == has_graphs
