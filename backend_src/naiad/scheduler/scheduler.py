"""Decides, step by step, which known tokens are computed next.

There is one rule and there are no phases: each step spends a budget of tokens on letting every
sequence's computed tokens catch up with its known tokens. It makes no difference whether these are a
long prompt, a chunk of one, the single token sampled last, or everything after a preemption.

The rule works on a projection: `Sequence.next_start` and `next_end` are the sequence's computed and
known tokens once all scheduled steps are complete. Adding a row advances them, so the next step can
be made before the result of the last one has arrived (steps overlap). The state after a step is
certain, except for the ids that it samples and whether one of them ends its sequence.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.outputs import ModelOutput, StepBatch, StepRow
from naiad.scheduler.policies import FirstComeFirstServed, SchedulingPolicy, rank_key
from naiad.scheduler.preemption import all_wait, choose_for_blocks, choose_for_first, num_spare_blocks
from naiad.scheduler.step_budget import SchedulerLimits, StepBudget
from naiad.scheduler.step_writer import StepWriter
from naiad.scheduler.tenants import Tenants
from naiad.scheduler.waiting_queue import WaitingQueue
from naiad.sequence import Sequence, SequenceStatus
from naiad.speculation.speculator import Speculator


class Scheduler:
    """Owns all live sequences, waiting and running.

    Sequences run in the order of their ranks, which never change. The one with the smallest rank is
    never preempted (see `preemption`), so it always advances, and eventually every sequence does.
    This relies on `admission`: a sequence alone in the cache always fits.

    Attributes:
        running: sequences that hold a slot, by rank.
        running_by_id: the same sequences by id.
        leaving: sequences that have ended while a step in flight still computes them, by id.
        projected: the latest step that was made while another was in flight, until it is complete;
            without rows if there is none.
        num_preemptions: number of times that a sequence gave up its slot.
        num_admissions: number of times that a sequence got one.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        limits: SchedulerLimits,
        policy: SchedulingPolicy | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """Start without sequences.

        Args:
            kv_cache: allocates the blocks.
            limits: the limits of a step.
            policy: None = first come, first served.
            speculator: drafts tokens where a step has room for them; None = no drafts.
        """
        self.kv_cache = kv_cache
        self.limits = limits
        self.policy: SchedulingPolicy = policy or FirstComeFirstServed()
        self.speculator = speculator
        self.tenants = Tenants()
        self.waiting = WaitingQueue(self.tenants)
        self.running: list[Sequence] = []
        self.running_by_id: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        self.projected = StepBatch()
        self.num_preemptions = 0
        self.num_admissions = 0
        self._writer = StepWriter()
        # Whether tenants with more than their share had no rows in the last step.
        self._is_pausing = False
        # Rows of the step that is being made, and ids of the sequences admitted for it.
        self._rows: list[StepRow] = []
        self._newcomers: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        assert sequence.status is SequenceStatus.WAITING
        sequence.rank = self.policy.rank(sequence)
        sequence.next_end = sequence.num_tokens
        # A beam's next token is chosen by its search, and nothing follows the last token.
        last = sequence.num_prompt_tokens + sequence.params.max_tokens - 1
        sequence.last_projected_end = 0 if sequence.params.num_candidates else last
        self.tenants.enter(sequence)
        self.waiting.add(sequence)

    def append(self, sequence: Sequence, token_id: int) -> None:
        """Append the token that the search chose for a running beam, after its computed tokens."""
        sequence.token_ids.append(token_id)
        sequence.next_end += 1

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in any state; its blocks are freed now, or by `release` if a step is using them."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
            if any(row.sequence_id == sequence.sequence_id for row in self.projected.rows):
                self.leaving[sequence.sequence_id] = sequence
            else:
                self.kv_cache.free(sequence)
        else:
            assert sequence.status is SequenceStatus.WAITING
            self.waiting.remove(sequence)
        self.tenants.leave(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        sequence.status = SequenceStatus.FINISHED

    def release(self, sequence_id: int) -> None:
        """Free the blocks of an ended sequence after the step that was still using them."""
        sequence = self.leaving.pop(sequence_id, None)
        if sequence is not None:
            self.kv_cache.free(sequence)

    def take_over(self, sequence: Sequence, donor: Sequence, token_id: int) -> None:
        """Make a running sequence continue from another one's tokens, with a different next token.

        Args:
            sequence: discards its own tokens and blocks.
            donor: a running sequence without uncomputed tokens, except for one that it may just have
                got.
            token_id: follows the donor's computed tokens.
        """
        self.kv_cache.free(sequence)
        self._writer.forget(sequence)
        sequence.token_ids = [*donor.token_ids[: donor.num_computed_tokens], token_id]
        sequence.next_end = sequence.num_tokens
        num_cached_tokens = self._fork(sequence, donor)
        if num_cached_tokens is None:
            self._preempt(sequence)
        else:
            sequence.num_computed_tokens = sequence.next_start = num_cached_tokens

    def schedule(self) -> StepBatch:
        """Choose the next step's work; no other step is in flight."""
        has_preempted = self._secure_blocks()
        # After a preemption no sequence is admitted, unless all the remaining ones wait.
        first = None if has_preempted and not all_wait(self.running) else self._first_waiting()
        if first is not None:
            for victim in choose_for_first(self, first):
                self._preempt(victim)
        return self._make_step(first, is_projected=False)

    def schedule_projected(self) -> StepBatch | None:
        """Choose the next step's work while a step is in flight.

        Nothing is preempted here, because a row in flight keeps its blocks.

        Returns:
            The step; None if no sequence can advance, or if one would have to be preempted: then the
            next step has to wait for the result of the current one.
        """
        running = self.running
        if all_wait(running) or not all(self.kv_cache.allocate(each, each.next_end) for each in running):
            return None
        first = self._first_waiting()
        if first is not None and choose_for_first(self, first):
            return None
        self.projected = self._make_step(first, is_projected=True)
        return self.projected

    def can_overlap(self, rows: Iterable[StepRow]) -> bool:
        """Whether the step after these rows can be made without their result.

        If one of them needs its ids on the host, the step is not made for the others either: it would
        get a token only in every second step.
        """
        running = (self.running_by_id.get(row.sequence_id) for row in rows)
        return all(each.overlaps and not self._may_draft(each) for each in running if each is not None)

    def update(self, step: StepBatch, output: ModelOutput) -> None:
        """Record a computed step: its KV is in the cache, and its sampled ids become known tokens.

        Beams get their next token through `append`. Sequences whose rows failed are left unchanged for
        the caller to remove. Rows of sequences that have ended meanwhile are ignored.
        """
        errors, sampled, running = output.errors, output.sampled_token_ids, self.running_by_id
        is_projected, has_windows = step.is_projected, self.kv_cache.has_windows
        if step is self.projected:
            self.projected = StepBatch()
        for row in step.rows:
            sequence_id = row.sequence_id
            sequence = running.get(sequence_id)
            if sequence is None or (errors and sequence_id in errors):
                continue
            sequence.num_computed_tokens += len(row.token_ids)
            if row.samples and not sequence.params.num_candidates:
                token_ids = sampled[sequence_id]
                sequence.token_ids += token_ids
                if row.draft_token_ids:
                    self._judge_drafts(sequence, row, len(token_ids) - 1)
            if is_projected:
                # This may complete a block whose last token was unknown when the step was made.
                self.kv_cache.publish(sequence, row.known_end)
            if has_windows:
                self.kv_cache.leave_window(sequence)

    def cut(self, sequence: Sequence, num_tokens: int, num_new: int) -> None:
        """Drop the tokens after a sequence's end; drafts among them no longer count as accepted.

        Args:
            sequence: has ended; the caller removes it next.
            num_tokens: number of known tokens up to the end.
            num_new: number of tokens that the last step added.
        """
        num_dropped = sequence.num_tokens - num_tokens
        if num_dropped:
            del sequence.token_ids[num_tokens:]
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens)
            if self.speculator is not None:
                self.speculator.dropped(sequence, max(0, num_new - num_dropped), num_new - 1)

    def _make_step(self, first: Sequence | None, is_projected: bool) -> StepBatch:
        """Distribute a step's tokens; every running sequence already has the blocks that it needs.

        Args:
            first: the sequence that is admitted next, if it fits.
            is_projected: another step is in flight.
        """
        active = self.running
        if first is not None and self.tenants.is_owed(first, self.limits.max_num_seqs) and self._admit(first):
            # Tenants above their share pause for its first token too, but never in two steps in a row.
            self._is_pausing = not self._is_pausing
            active = self.tenants.without_excess(self.running, self.limits.max_num_seqs, self._is_pausing)
            first = self._first_waiting()
        else:
            self._is_pausing = False
        rows = self._rows = []
        lagging: list[Sequence] = []
        budget = StepBudget(self.limits)
        # Sequences that miss one token come first: no long prompt may delay running streams.
        for sequence in active:
            num_missing = sequence.next_end - sequence.next_start
            if num_missing > 1:
                lagging.append(sequence)
            elif num_missing == 1:
                self._spend(budget, sequence, rows)
        self._catch_up(budget, lagging, rows, first)
        if self.speculator is not None and not budget.is_spent:
            self._add_drafts(self.speculator, budget, rows)
        self.tenants.pass_step(budget.num_taken)
        self._newcomers.clear()
        self._rows = []
        return self._writer.batch(rows, self.kv_cache.take_copies() if rows else [], is_projected)

    def _secure_blocks(self) -> bool:
        """Allocate blocks for the known tokens of every running sequence, preempting others if needed.

        Returns:
            Whether any sequence was preempted.
        """
        block_size, num_before = self.kv_cache.block_size, self.num_preemptions
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            num_tokens = sequence.next_end
            # The last group's table is the shortest.
            num_held = len(sequence.block_tables[-1]) * block_size
            if num_held >= num_tokens or self.kv_cache.allocate(sequence, num_tokens):
                index += 1
                continue
            assert len(self.running) > 1, "a sequence alone does not fit the KV cache"
            victim = choose_for_blocks(self.running, self.tenants, self.limits.max_num_seqs)
            # If the victim comes before this index, everything after it moves down by one.
            index -= rank_key(victim) < rank_key(sequence)
            self._preempt(victim)
        return self.num_preemptions > num_before

    def _first_waiting(self) -> Sequence | None:
        """The sequence that is admitted next.

        Beams wait for each other. If all running sequences wait for beams in the queue, the smallest
        rank goes first, regardless of its tenant: then some search advances.
        """
        if self.waiting and self.running and self._is_stuck():
            return min(self.waiting, key=rank_key)
        return self.waiting.first(self._can_start, self.limits.max_num_seqs)

    def _is_stuck(self) -> bool:
        """Whether all running sequences wait; one with a row in the step that is being made does not."""
        return not self._rows and all_wait(self.running)

    def _can_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may be admitted now: only after its donor has computed what they share.

        If the donor was admitted for this very step, the blocks that it found in the prefix cache may be
        written in this step, and it is too early to copy them.
        """
        donor = sequence.donor
        return (
            donor is None
            or donor.status is not SequenceStatus.RUNNING
            or sequence.num_preemptions > 0
            or (
                donor.next_start >= sequence.num_tokens - 1
                and donor.sequence_id not in self._newcomers
                and self._start_in_step(donor) >= sequence.num_tokens - 1
            )
        )

    def _start_in_step(self, sequence: Sequence) -> int:
        """How many of the sequence's tokens are computed before the step that is being made."""
        starts = (row.start for row in self._rows if row.sequence_id == sequence.sequence_id)
        return next(starts, sequence.next_start)

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue; tokens that leave the cache are recomputed later."""
        self._stop_running(sequence)
        self.kv_cache.free(sequence)
        sequence.num_computed_tokens = sequence.next_start = 0
        sequence.next_end = sequence.num_tokens
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self.running, rank_key(sequence), key=rank_key)
        assert self.running[index] is sequence, "the sequence does not run"
        del self.running[index]
        del self.running_by_id[sequence.sequence_id]
        self._writer.forget(sequence)
        self.tenants.of(sequence).num_running -= 1

    def _spend(self, budget: StepBudget, sequence: Sequence, rows: list[StepRow]) -> None:
        """Add a sequence's row, if the budget has tokens for it, and advance its projection."""
        start, num_known = sequence.next_start, sequence.next_end
        num_tokens = budget.take(start, num_known - start)
        if num_tokens == 0:
            return
        rows.append(self._writer.row(sequence, num_tokens))
        end = sequence.next_start = start + num_tokens
        if end == num_known and end < sequence.last_projected_end:
            sequence.next_end = end + 1
        self.kv_cache.publish(sequence, end)
        self.tenants.of(sequence).num_served_tokens += num_tokens

    def _catch_up(
        self,
        budget: StepBudget,
        lagging: list[Sequence],
        rows: list[StepRow],
        first: Sequence | None,
    ) -> None:
        """Spend the rest on running sequences that miss several tokens, and on waiting ones.

        If the first sequence in the queue does not fit, no other is admitted before it.
        """
        lagging.sort(key=self.tenants.order)
        while not budget.is_spent:
            if first is not None and (
                not lagging or self.tenants.order(first) < self.tenants.order(lagging[0])
            ):
                if self._admit(first):
                    self._spend(budget, first, rows)
                    first = self._first_waiting()
                else:
                    first = None
            elif lagging:
                self._spend(budget, lagging.pop(0), rows)
            else:
                break

    def _admit(self, sequence: Sequence) -> bool:
        """Admit the first sequence in the queue, if there is a slot and blocks for all its known tokens.

        A sequence admitted with blocks for its first chunk only would soon be preempted. So would a
        sequence that was preempted before, as soon as each running one needed another block.
        """
        if len(self.running) >= self.limits.max_num_seqs:
            return False
        donor = sequence.donor
        if donor is not None and donor.status is SequenceStatus.RUNNING and sequence.num_preemptions == 0:
            num_cached_tokens = self._fork(sequence, donor)
        else:
            num_spare = num_spare_blocks(self.running, sequence, self._is_stuck())
            num_cached_tokens = self.kv_cache.admit(sequence, num_spare)
        if num_cached_tokens is None:
            return False
        self.waiting.remove(sequence)
        sequence.donor = None
        sequence.num_computed_tokens = sequence.next_start = num_cached_tokens
        if sequence.num_preemptions == 0:
            # Tokens that siblings and beams share with each other are not prefix cache hits.
            sequence.num_cached_tokens = num_cached_tokens if donor is None else donor.num_cached_tokens
            sequence.num_reused_blocks = num_cached_tokens // self.kv_cache.block_size
        sequence.status = SequenceStatus.RUNNING
        self._newcomers.add(sequence.sequence_id)
        self.num_admissions += 1
        bisect.insort(self.running, sequence, key=rank_key)
        self.running_by_id[sequence.sequence_id] = sequence
        self.tenants.of(sequence).num_running += 1
        return True

    def _fork(self, sequence: Sequence, donor: Sequence) -> int | None:
        """Give a sequence the blocks of the tokens that it shares with a donor; see `KVCacheManager.fork`."""
        assert donor.next_start >= sequence.num_tokens - 1, "the donor has yet to compute what they share"
        num_cached_tokens = self.kv_cache.fork(sequence, donor)
        if num_cached_tokens is not None:
            self._writer.clone(sequence, donor)
        return num_cached_tokens

    def _may_draft(self, sequence: Sequence) -> bool:
        return self.speculator is not None and self.speculator.may_draft(sequence)

    def _add_drafts(self, speculator: Speculator, budget: StepBudget, rows: list[StepRow]) -> None:
        """Extend rows that reach the last known token by drafts, as far as the step's budget allows.

        Drafts take free blocks, but no sequence is preempted for them. Beams get no drafts, because they
        choose among many next tokens.
        """
        drafting: list[tuple[StepRow, Sequence]] = []
        for row in rows:
            sequence = self.running_by_id[row.sequence_id]
            if row.samples and speculator.may_draft(sequence) and not sequence.params.num_candidates:
                drafting.append((row, sequence))
        if not drafting:
            return
        sequences = [sequence for _, sequence in drafting]
        # The step yields one token besides the accepted drafts.
        num_left = [each.params.max_tokens - each.num_output_tokens - 1 for each in sequences]
        drafts = speculator.drafts(sequences, num_left, budget.num_drafts_left, budget.num_taken)
        for (row, sequence), draft in zip(drafting, drafts, strict=True):
            kept: list[int] = []
            if draft:
                num_tokens = sequence.num_tokens
                num_held = self.kv_cache.extend(sequence, num_tokens + len(draft)) - num_tokens
                kept = draft[: budget.take_drafts(num_tokens, num_held)]
            if kept:
                self.tenants.of(sequence).num_served_tokens += len(kept)
                self._writer.add_drafts(sequence, row, kept)
            elif draft or speculator.takes_blocks:
                # Blocks may have been taken for drafts that are not in the step.
                self._trim(sequence)

    def _judge_drafts(self, sequence: Sequence, row: StepRow, num_accepted: int) -> None:
        """Record how many of a row's drafts the model accepted."""
        sequence.num_computed_tokens += num_accepted
        sequence.next_start, sequence.next_end = sequence.num_computed_tokens, sequence.num_tokens
        if self.speculator is not None:
            self.speculator.judged(sequence, len(row.draft_token_ids), num_accepted)
            self._trim(sequence)

    def _trim(self, sequence: Sequence) -> None:
        self.kv_cache.trim(sequence)
        self._writer.trimmed(sequence)
