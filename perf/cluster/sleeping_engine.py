"""An engine process whose steps sleep for as long as they took on a measured replica.

    python -m perf.cluster.sleeping_engine --costs FILE …

Further options are those of `naiad.engine_process`. Scheduler, KV cache and prefix cache are the engine's
own. `sleeping_llm_model` uses it in a server, so that more replicas run on a machine than can compute there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from perf.cluster.replica import make_engine
from perf.cluster.replica_spec import ReplicaSpec, read_spec
from perf.engine.admission import SimulatedRunner

from naiad.config import ModelConfig
from naiad.engine import Engine
from naiad.engine_process.__main__ import parse
from naiad.engine_process.protocol import Checkpoint
from naiad.engine_process.serving.loop import serve
from naiad.engine_process.serving.queue_gate import QueueLimits
from naiad.outputs import ModelOutput, ServedModel, StepBatch

# A step that comes late is followed by shorter ones, to make up for at most this delay.
_MAX_DEBT_S = 0.001


class SleepingRunner(SimulatedRunner):
    """Sleeps instead of computing."""

    def __init__(self, spec: ReplicaSpec, model_config: ServedModel) -> None:
        """Serve in place of a model of this configuration."""
        # The engine takes its own time around each step.
        super().__init__(msgspec.structs.replace(spec, overhead_s=0.0), spec.max_model_len)
        self.model_config: Any = model_config
        self._due_s = 0.0

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        """Let the step's time pass."""
        before_s = self.now_s
        output = super().launch(step)
        # What `sleep` oversleeps is made up for by the next step.
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - _MAX_DEBT_S) + self.now_s - before_s
        time.sleep(max(0.0, self._due_s - now_s))
        return output


def sleeping_llm_model(costs: str) -> type[Any]:
    """Make the `llm` model with this engine, for the model.py of a repository.

    Args:
        costs: path of what `perf.cluster.measure` has written.
    """
    from naiad.engine_process.clients import engine_client
    from naiad.triton_server.models.llm import LLMModel

    client: Any = engine_client
    command = [*client.default_command()[:1], "-m", "perf.cluster.sleeping_engine", "--costs", costs]
    client.default_command = lambda: command
    return LLMModel


def main() -> None:
    """Serve until the parent ends."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--costs", type=Path, required=True)
    options, rest = parser.parse_known_args(sys.argv[1:])
    config, socket_path, parent_pid = parse(rest)
    spec = read_spec(options.costs)
    limits = QueueLimits(spec.max_num_seqs, spec.max_queued_requests, config.max_queued_tokens)

    def build() -> Engine:
        runner = SleepingRunner(spec, ModelConfig.from_directory(config.model_dir))
        return make_engine(spec, runner, time.monotonic)[0]

    serve(build, socket_path, parent_pid, limits, Checkpoint.of(config))


if __name__ == "__main__":
    main()
