"""Decides, step by step, which known tokens are computed next.

There is one rule and there are no phases: each step spends a budget of tokens on letting every
sequence's `num_computed_tokens` catch up with its known tokens. Whether that is a long prompt,
a piece of one, the single token sampled last, or all of it again after a preemption makes no
difference.
"""

from __future__ import annotations

import bisect
from dataclasses import replace

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.outputs import ModelOutput, ScheduledSequence, SchedulerOutput
from naiad.scheduler.donors import can_start
from naiad.scheduler.draft_rows import add_drafts
from naiad.scheduler.foresight import can_step
from naiad.scheduler.policies import FirstComeFirstServed, SchedulingPolicy, rank_key
from naiad.scheduler.preemption import all_wait, choose_for_blocks, choose_for_first, num_spare_blocks
from naiad.scheduler.step_budget import SchedulerLimits, StepBudget
from naiad.scheduler.tenants import Tenants
from naiad.scheduler.waiting_queue import WaitingQueue
from naiad.sequence import Sequence, SequenceStatus
from naiad.speculation.speculator import Speculator


class Scheduler:
    """Owns all live sequences: those that wait and those that run.

    Sequences run in the order of their ranks, which never change. Whoever has the smallest is
    never preempted (see `preemption`), so it always advances, and with it everybody in the end.
    It relies on `admission`: a sequence alone in the cache always fits.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        limits: SchedulerLimits,
        policy: SchedulingPolicy | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """Have no sequences.

        Args:
            kv_cache: its blocks are shared out.
            limits: of a step.
            policy: None = first come, first served.
            speculator: drafts tokens where a step has room for them; None = nobody does.
        """
        self.kv_cache = kv_cache
        self.limits = limits
        self.policy: SchedulingPolicy = policy or FirstComeFirstServed()
        self.speculator = speculator
        self.tenants = Tenants()
        self.waiting = WaitingQueue(self.tenants)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        # Made by `schedule_ahead` and not over; without rows if there is none.
        self.ahead = SchedulerOutput()
        # Of those that have ended, the ones that `ahead` computes all the same.
        self.leaving: set[Sequence] = set()
        # Whether tenants with more than their share had no rows in the last step.
        self._is_pausing = False
        # Ids of those that the step that is being made has admitted.
        self._newcomers: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether any sequence lives."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        assert sequence.status is SequenceStatus.WAITING
        sequence.rank = self.policy.rank(sequence)
        self.tenants.enter(sequence)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is, and free its blocks, unless a step that is under way has it."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
            if any(row.sequence is sequence for row in self.ahead.scheduled):
                self.leaving.add(sequence)
            else:
                self.kv_cache.free(sequence)
        else:
            assert sequence.status is SequenceStatus.WAITING
            self.waiting.remove(sequence)
        self.tenants.leave(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        sequence.status = SequenceStatus.FINISHED

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has ended, if only a step kept them that is over now."""
        if sequence in self.leaving:
            self.leaving.remove(sequence)
            self.kv_cache.free(sequence)

    def take_over(self, sequence: Sequence, donor: Sequence, token_id: int) -> None:
        """Let a running sequence go on where another one is, with a token of its own.

        Args:
            sequence: gives up its own past.
            donor: runs, and all it knew has been computed; it may know one token more by now.
            token_id: follows what the donor has computed.
        """
        self.kv_cache.free(sequence)
        sequence.token_ids = [*donor.token_ids[: donor.num_computed_tokens], token_id]
        num_cached_tokens = self.kv_cache.fork(sequence, donor)
        if num_cached_tokens is None:
            self._preempt(sequence)
        else:
            sequence.num_computed_tokens = num_cached_tokens

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work. Every row's blocks are there when it returns."""
        has_preempted = self._secure_blocks()
        # Nobody comes where somebody had to go, unless all that are left wait for others.
        first = None if has_preempted and not all_wait(self.running) else self._first_waiting()
        if first is not None:
            for victim in choose_for_first(self, first):
                self._preempt(victim)
        active = self.running
        if first is not None and self.tenants.is_owed(first, self.limits.max_num_seqs) and self._admit(first):
            # So its first token does not wait for theirs either; but they never wait for two steps.
            self._is_pausing = not self._is_pausing
            active = self.tenants.without_excess(self.running, self.limits.max_num_seqs, self._is_pausing)
            first = self._first_waiting()
        else:
            self._is_pausing = False
        rows: list[ScheduledSequence] = []
        behind: list[Sequence] = []
        budget = StepBudget(self.limits)
        # One token each first: no long prompt may hold up those that stream.
        for sequence in active:
            num_missing = len(sequence.token_ids) - sequence.num_computed_tokens
            if num_missing > 1:
                behind.append(sequence)
            elif num_missing == 1:
                self._spend(budget, sequence, rows)
        self._catch_up(budget, behind, rows, first)
        if self.speculator is not None:
            add_drafts(self.speculator, self.kv_cache, self.tenants, budget, rows)
        self.tenants.pass_step(rows)
        self._newcomers.clear()
        copies = self.kv_cache.take_copies()
        return SchedulerOutput(rows, copies[0] if copies else [])

    def schedule_ahead(self) -> SchedulerOutput | None:
        """`schedule` while a step is under way that is foreseen; None: see `foresight.can_step`."""
        if not can_step(self, self._first_waiting):
            return None
        self.ahead = replace(self.schedule(), is_ahead=True)
        return self.ahead

    def update(self, scheduled: SchedulerOutput, output: ModelOutput) -> None:
        """Book a computed step: KV is in the cache, sampled ids are known tokens.

        Beams learn their next token elsewhere. Rows that failed are left as they are, for the
        caller to remove. Those of sequences that have ended meanwhile change nothing.
        """
        errors, sampled = output.errors, output.sampled_token_ids
        has_windows = self.kv_cache.has_windows
        rows, is_ahead = scheduled.scheduled, scheduled.is_ahead
        if is_ahead:
            rows = [row for row in rows if row.sequence.status is SequenceStatus.RUNNING]
            if scheduled is self.ahead:
                self.ahead = SchedulerOutput()
        for row in rows:
            sequence = row.sequence
            if errors and sequence.sequence_id in errors:
                continue
            num_drafts = len(row.draft_token_ids)
            sequence.num_computed_tokens += row.num_scheduled_tokens - num_drafts
            if row.samples and not sequence.params.num_candidates:
                token_ids = sampled[sequence.sequence_id]
                num_accepted = len(token_ids) - 1
                sequence.num_computed_tokens += num_accepted
                sequence.token_ids += token_ids
                if num_drafts and self.speculator is not None:
                    self.speculator.judged(sequence, num_drafts, num_accepted)
                    self.kv_cache.trim(sequence)
            if is_ahead:
                # A block that ends with a token which was not known then.
                self.kv_cache.publish(sequence, row.start + row.num_scheduled_tokens - num_drafts)
            if has_windows:
                self.kv_cache.leave_window(sequence)

    def _secure_blocks(self) -> bool:
        """Let every running sequence have blocks for its known tokens; others give way.

        Returns:
            Whether any was preempted.
        """
        block_size, num_before = self.kv_cache.block_size, self.num_preemptions
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            num_tokens = len(sequence.token_ids)
            # The last group's table is the shortest.
            num_held = len(sequence.block_tables[-1]) * block_size
            if num_held >= num_tokens or self.kv_cache.allocate(sequence, num_tokens):
                index += 1
                continue
            assert len(self.running) > 1, "a sequence alone does not fit the KV cache"
            victim = choose_for_blocks(self.running, self.tenants, self.limits.max_num_seqs)
            # Who stands before the place we are at leaves a gap there.
            index -= rank_key(victim) < rank_key(sequence)
            self._preempt(victim)
        return self.num_preemptions > num_before

    def _first_waiting(self) -> Sequence | None:
        """Who is admitted next.

        Beams wait for each other. If all that run do, because some of theirs are in the queue,
        the smallest rank goes first whoever its tenant is: then some search advances.
        """
        if self.waiting and self.running and all_wait(self.running):
            return min(self.waiting, key=rank_key)
        return self.waiting.first(lambda each: can_start(each, self._newcomers), self.limits.max_num_seqs)

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue; what the cache loses is computed again."""
        self._stop_running(sequence)
        self.kv_cache.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self.running, rank_key(sequence), key=rank_key)
        assert self.running[index] is sequence, "the sequence does not run"
        del self.running[index]
        self.tenants.of(sequence).num_running -= 1

    def _spend(self, budget: StepBudget, sequence: Sequence, rows: list[ScheduledSequence]) -> None:
        """Add a sequence's row, if the budget gives it any tokens."""
        start, num_known = sequence.num_computed_tokens, len(sequence.token_ids)
        num_tokens = budget.take(start, num_known - start)
        if num_tokens == 0:
            return
        end = start + num_tokens
        rows.append(ScheduledSequence(sequence, start, num_tokens, end == num_known))
        self.kv_cache.publish(sequence, end)
        self.tenants.of(sequence).num_served_tokens += num_tokens

    def _catch_up(
        self,
        budget: StepBudget,
        behind: list[Sequence],
        rows: list[ScheduledSequence],
        first: Sequence | None,
    ) -> None:
        """Spend what is left on those that run and miss several tokens, and on those that wait.

        Nobody overtakes the first in the queue when it does not fit.
        """
        behind.sort(key=self.tenants.order)
        while not budget.is_spent:
            if first is not None and (
                not behind or self.tenants.order(first) < self.tenants.order(behind[0])
            ):
                if self._admit(first):
                    self._spend(budget, first, rows)
                    first = self._first_waiting()
                else:
                    first = None
            elif behind:
                self._spend(budget, behind.pop(0), rows)
            else:
                break

    def _admit(self, sequence: Sequence) -> bool:
        """Let the first in the queue run, if there is a slot and blocks for all its known tokens.

        A sequence that came in with its first chunk only would soon be preempted again; so would
        one that was preempted, if those that run needed a block each.
        """
        if len(self.running) >= self.limits.max_num_seqs:
            return False
        donor = sequence.donor
        if donor is not None and donor.status is SequenceStatus.RUNNING and sequence.num_preemptions == 0:
            num_cached_tokens = self.kv_cache.fork(sequence, donor)
        else:
            num_cached_tokens = self.kv_cache.admit(sequence, num_spare_blocks(self.running, sequence))
        if num_cached_tokens is None:
            return False
        self.waiting.remove(sequence)
        sequence.donor = None
        sequence.num_computed_tokens = num_cached_tokens
        if sequence.num_preemptions == 0:
            # What siblings and beams take from each other is no hit of the cache.
            sequence.num_cached_tokens = num_cached_tokens if donor is None else donor.num_cached_tokens
            sequence.num_reused_blocks = num_cached_tokens // self.kv_cache.block_size
        sequence.status = SequenceStatus.RUNNING
        self._newcomers.add(sequence.sequence_id)
        bisect.insort(self.running, sequence, key=rank_key)
        self.tenants.of(sequence).num_running += 1
        return True
