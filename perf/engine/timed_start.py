"""One start of an engine in a process of its own; `perf.engine.start` runs it.

    python -m perf.engine.timed_start STARTED_AT SETTINGS

STARTED_AT is the time at which the caller started this process, SETTINGS the engine's settings as JSON. One
line of JSON is printed: the seconds of each phase, what loading added to the memory, the generated ids.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_NUM_TOKENS = 16
_PROMPT = range(1, 33)
# Function of `naiad.model_runner.model_runner` → the phase that it is.
_RUNNER_PHASES = {"load_model": "weights", "measure_token_budget": "measuring"}


class Phases:
    """A process's phases.

    Attributes:
        seconds: of each phase, in their order.
        loading_bytes: what the process held at most while weights were loaded, beyond what it held before.
    """

    def __init__(self, started_at: float) -> None:
        """Begin when the process was started."""
        self.seconds: dict[str, float] = {}
        self.loading_bytes = 0
        self._last = started_at

    def end(self, name: str) -> None:
        """End a phase: what is not yet part of another one."""
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now

    def around(self, module: Any, phases: Mapping[str, str]) -> None:
        """Make phases of a module's functions."""
        for function, phase in phases.items():
            setattr(module, function, self._timed(getattr(module, function), phase))

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak
            before_bytes, start = memory_bytes("VmRSS"), time.time()
            result = function(*args, **kwargs)
            taken_s = time.time() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + taken_s
            self._last += taken_s
            if phase == "weights":
                self.loading_bytes = max(self.loading_bytes, memory_bytes("VmHWM") - before_bytes)
            return result

        return timed


def main() -> None:
    """Start, generate, print."""
    phases = Phases(float(sys.argv[1]))
    phases.end("python")
    import torch  # noqa: F401 — a phase of its own

    phases.end("import torch")
    from naiad.config import EngineConfig
    from naiad.engine import build_engine
    from naiad.model_runner import model_runner
    from naiad.sequence import EngineRequest, SamplingParams
    from naiad.tokenization.token_table import TokenTable

    phases.end("import naiad")
    phases.around(TokenTable, {"from_directory": "tokenizer"})
    phases.around(model_runner, _RUNNER_PHASES)
    engine = build_engine(EngineConfig(**json.loads(sys.argv[2])))
    phases.end("the rest")
    prompt = [each % engine.model_config.vocab_size for each in _PROMPT]
    engine.add_request(
        EngineRequest(sequence_id=1, prompt_token_ids=prompt, params=SamplingParams(max_tokens=_NUM_TOKENS))
    )
    ids: list[int] = []
    while engine.has_work:
        ids += [each for output in engine.step() for each in output.token_ids]
        if "first token" not in phases.seconds:
            phases.end("first token")
    report = {"seconds": phases.seconds, "loading_bytes": phases.loading_bytes, "ids": ids}
    print(json.dumps(report), flush=True)


def memory_bytes(name: str) -> int:
    """VmRSS, what this process holds, or VmHWM, the most that it has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


if __name__ == "__main__":
    main()
