"""A simulated replica: the engine's own scheduler and KV cache, with steps that only take time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perf.cluster.replica_spec import ReplicaSpec
from perf.engine.admission import SimulatedRunner

from naiad.engine import Engine
from naiad.engine.step_runner import StepRunner
from naiad.kv_cache.cache_log import CacheChange, CacheLog
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import RequestOutput
from naiad.scheduler.policies import PriorityFirst
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import EngineRequest

_AGING_S = 10.0


def make_engine(
    spec: ReplicaSpec, runner: StepRunner, clock: Callable[[], float], log: CacheLog | None = None
) -> tuple[Engine, KVCacheManager]:
    """Make the engine of a replica, and its KV cache.

    Args:
        spec: its limits.
        runner: computes the steps.
        clock: returns the time in seconds.
        log: gets what the prefix cache stores and removes.
    """
    cache = PrefixCache(spec.block_size, observer=log)
    kv_cache = KVCacheManager(spec.num_blocks, spec.block_size, cache, max_step_tokens=spec.step_tokens)
    limits = SchedulerLimits(spec.max_num_seqs, spec.step_tokens, spec.context_cost, spec.decode_cost)
    return Engine(Scheduler(kv_cache, limits, PriorityFirst(_AGING_S)), runner, clock=clock), kv_cache


class Replica:
    """One engine on a simulated clock.

    Requests are taken between steps, as by the engine process: what comes during a step waits for its end.

    Attributes:
        num_steps: steps computed.
        busy_s: their time.
        is_stepping: whether a step is under way.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        """Start empty, at time 0."""
        self.num_steps = 0
        self.busy_s = 0.0
        self.is_stepping = False
        self._log = CacheLog()
        self._runner = SimulatedRunner(spec, spec.max_model_len)
        self._engine, self._kv_cache = make_engine(spec, self._runner, lambda: self._runner.now_s, self._log)
        self._max_open = spec.max_num_seqs + spec.max_queued_requests
        self._inbox: list[EngineRequest] = []
        self._num_open = 0
        self._outputs: list[RequestOutput] = []

    @property
    def has_room(self) -> bool:
        """Whether its queue takes another request."""
        return self._num_open < self._max_open

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._inbox) or self._engine.has_work

    @property
    def cached_tokens(self) -> tuple[int, int]:
        """Prompt tokens found in the prefix cache, and prompt tokens looked up."""
        return self._kv_cache.num_hit_tokens, self._kv_cache.num_queried_tokens

    def add(self, request: EngineRequest) -> None:
        """Take a request at the end of the step under way."""
        self._num_open += 1
        self._inbox.append(request)

    def begin_step(self, now_s: float) -> float:
        """Compute a step that begins now; returns when it ends."""
        self._runner.now_s = now_s
        for request in self._inbox:
            self._engine.add_request(request)
        self._inbox.clear()
        self._outputs = self._engine.step()
        self.is_stepping = True
        self.num_steps += 1
        self.busy_s += self._runner.now_s - now_s
        return self._runner.now_s

    def end_step(self) -> Sequence[RequestOutput]:
        """Return the outputs of the step that has ended."""
        self.is_stepping = False
        outputs, self._outputs = self._outputs, []
        self._num_open -= sum(each.finish_reason is not None for each in outputs)
        return outputs

    def take_changes(self) -> list[CacheChange]:
        """The changes of its prefix cache since the last call."""
        return self._log.take()

    def check_empty(self) -> None:
        """Check that nothing is left when all requests have ended.

        Raises:
            RuntimeError: something is.
        """
        if self.has_work or self.is_stepping or self._num_open or self._kv_cache.num_used_blocks:
            raise RuntimeError("a replica still holds requests or blocks after the last request has ended")
