"""A scheduler that tests drive step by step, without an engine."""

from __future__ import annotations

from helpers.invariants import check_invariants
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import ModelOutput, StepBatch
from naiad.scheduler.policies import SchedulingPolicy
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import PrefixIdentity, SamplingParams, Sequence

BLOCK_SIZE = 4


class Desk:
    """A scheduler whose every sampled token is 7."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 32,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        kv_cache = KVCacheManager(num_blocks, BLOCK_SIZE, PrefixCache(BLOCK_SIZE))
        self.scheduler = Scheduler(kv_cache, SchedulerLimits(max_num_seqs, budget), policy)
        self.num_added = 0

    def add(
        self,
        num_tokens: int = 2,
        priority: int = 0,
        salt: str = "",
        first_id: int | None = None,
        donor: Sequence | None = None,
        tenant: str | None = None,
    ) -> Sequence:
        self.num_added += 1
        start = 1000 * self.num_added if first_id is None else first_id
        sequence = Sequence(
            sequence_id=self.num_added,
            token_ids=list(range(start, start + num_tokens)),
            num_prompt_tokens=num_tokens,
            params=SamplingParams(max_tokens=1000, priority=priority),
            arrival_s=donor.arrival_s if donor else float(self.num_added),
            tenant=salt if tenant is None else tenant,
            prefix_identity=PrefixIdentity(salt),
            donor=donor,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """Run a step; return the (sequence id, number of tokens) of its rows."""
        step = self.scheduler.schedule()
        check_invariants(self.scheduler, step)
        self.book(step)
        return [(row.sequence_id, row.num_scheduled_tokens) for row in step.rows]

    def book(self, step: StepBatch) -> None:
        sampled = {row.sequence_id: [7] for row in step.rows if row.samples}
        self.scheduler.update(step, ModelOutput(sampled))
        check_invariants(self.scheduler)

    def running(self) -> list[int]:
        return [sequence.sequence_id for sequence in self.scheduler.running]
