"""Decides, step by step, which known tokens are computed next.

There is one rule and there are no phases: each step spends a budget of tokens on letting every
sequence's `num_computed_tokens` catch up with its known tokens. Whether that is a long prompt,
a piece of one, the single token sampled last, or all of it again after a preemption makes no
difference.
"""

from __future__ import annotations

from collections.abc import Iterable

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.outputs import ModelOutput, ScheduledSequence, SchedulerOutput
from naiad.scheduler.step_budget import SchedulerLimits, StepBudget
from naiad.scheduler.waiting_queue import WaitingQueue
from naiad.sequence import Sequence, SequenceStatus


class Scheduler:
    """Owns all live sequences: those that wait and those that run.

    Sequences run in the order of their arrival, and whoever waits is younger than all who run:
    only the youngest is ever preempted, and it is the first to come back. So the oldest
    sequence always advances, and with it everybody in the end. It relies on `admission`: a
    sequence alone in the cache always fits.
    """

    def __init__(self, kv_cache: KVCacheManager, limits: SchedulerLimits) -> None:
        """Schedule into the blocks of `kv_cache`."""
        self.kv_cache = kv_cache
        self.limits = limits
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence lives."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        assert sequence.status is SequenceStatus.WAITING
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            assert sequence.status is SequenceStatus.WAITING
            self.waiting.remove(sequence)
        self.kv_cache.free(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work. Every row's blocks are there when it returns."""
        has_preempted = self._secure_blocks()
        rows: list[ScheduledSequence] = []
        # One token each first: no long prompt may hold up those that stream.
        budget = StepBudget(self.limits)
        self._spend(budget, (s for s in self.running if _num_missing(s) == 1), rows)
        self._spend(budget, (s for s in self.running if _num_missing(s) > 1), rows)
        if not has_preempted:
            self._admit(budget, rows)
        return SchedulerOutput(rows)

    def update(self, scheduled: SchedulerOutput, output: ModelOutput) -> None:
        """Book a computed step: KV is in the cache, sampled ids are known tokens.

        Rows that failed are left as they are, for the caller to remove.
        """
        for row in scheduled.scheduled:
            sequence = row.sequence
            if sequence.sequence_id in output.errors:
                continue
            sequence.num_computed_tokens += row.num_scheduled_tokens
            if row.samples:
                sequence.token_ids.append(output.sampled_token_ids[sequence.sequence_id])

    def _secure_blocks(self) -> bool:
        """Let every running sequence have blocks for its known tokens; the youngest give way.

        Returns:
            Whether any was preempted.
        """
        num_before = len(self.running)
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self.kv_cache.allocate(sequence, sequence.num_tokens):
                index += 1
            else:
                self._preempt(self.running[-1])
        return len(self.running) < num_before

    def _preempt(self, sequence: Sequence) -> None:
        """Send the youngest running sequence back to the queue; it is recomputed later."""
        assert len(self.running) > 1, "a sequence alone does not fit the KV cache"
        self.running.pop()
        self.kv_cache.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.prepend(sequence)
        self.num_preemptions += 1

    def _spend(
        self, budget: StepBudget, sequences: Iterable[Sequence], rows: list[ScheduledSequence]
    ) -> None:
        """Add a row for each sequence while the budget lasts."""
        for sequence in sequences:
            start = sequence.num_computed_tokens
            num_tokens = budget.take(start, _num_missing(sequence))
            if num_tokens == 0:
                break
            samples = start + num_tokens == sequence.num_tokens
            rows.append(ScheduledSequence(sequence, start, num_tokens, samples))

    def _admit(self, budget: StepBudget, rows: list[ScheduledSequence]) -> None:
        """Let waiting sequences in, in order, while budget, slots and blocks last.

        All known tokens have to fit now: a sequence that came in with its first chunk only
        would soon be preempted again. Nobody overtakes one that does not fit.
        """
        while self.waiting and not budget.is_spent and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting.first()
            num_cached_tokens = self.kv_cache.admit(sequence)
            if num_cached_tokens is None:
                break
            self.waiting.remove(sequence)
            sequence.num_computed_tokens = num_cached_tokens
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = num_cached_tokens
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            self._spend(budget, [sequence], rows)


def _num_missing(sequence: Sequence) -> int:
    """Known tokens whose KV is not in the cache; at least 1 while a sequence runs."""
    return sequence.num_tokens - sequence.num_computed_tokens
