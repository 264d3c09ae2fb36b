"""Predicts when a request that comes now would get its first token."""

from __future__ import annotations

import math

from naiad.scheduler.policies import rank_key
from naiad.scheduler.scheduler import Scheduler
from naiad.sequence import Sequence

# What was measured this long ago counts 1 / e.
_MEMORY_S = 10.0
# How much a forecast that was exceeded raises those that follow. One that was kept lowers them by a ninth of
# that, so nine of ten are kept.
_RAISE = 1.05
_LOWER = _RAISE ** (-1 / 9)
_MOST = 4.0
# Shorter forecasts teach nothing: a step takes about as long.
_LEAST_S = 0.1


class _Rate:
    """How many of something there were in a second, of late."""

    def __init__(self) -> None:
        self._number = self._seconds = 0.0

    def add(self, number: int, seconds: float) -> None:
        fading = math.exp(-seconds / _MEMORY_S)
        self._number = self._number * fading + number
        self._seconds = self._seconds * fading + seconds

    def seconds_for(self, number: float) -> float:
        """How long this many take; 0 as long as none has been seen."""
        return number * self._seconds / self._number if self._number and number > 0 else 0.0


class FirstTokenForecast:
    """Measures how fast prompts are computed and sequences are admitted, and divides the queue by it.

    Only what comes before a new sequence counts. Within its tenant that is what has a smaller rank. Tenants
    take turns, so of the others no more comes before it than of its own tenant, for each of them. The result
    is multiplied by a margin, so that nine of ten first tokens come by then.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Look at the queue of `scheduler`; nothing has been measured."""
        self._scheduler = scheduler
        self._prompt_tokens, self._admissions = _Rate(), _Rate()
        self._margin = 1.0
        # Of sequences without a token: what was expected, before the margin.
        self._expected_s: dict[int, float] = {}

    def take_step(self, seconds: float, num_prompt_tokens: int, num_admitted: int, has_queue: bool) -> None:
        """Take a step that has been computed.

        Args:
            seconds: its duration.
            num_prompt_tokens: number of prompt tokens that it computed.
            num_admitted: number of sequences that left the queue for it.
            has_queue: whether any sequence waited when it was made.
        """
        if num_prompt_tokens:
            self._prompt_tokens.add(num_prompt_tokens, seconds)
        if has_queue:
            self._admissions.add(num_admitted, seconds)

    def seconds_until(self, sequence: Sequence) -> float:
        """Return the seconds until the first token of a sequence that has not been added yet.

        What has not been measured counts nothing, so the first requests after the start are never too late.
        """
        return self._margin * self._likely_seconds(sequence)

    def remember(self, sequence_id: int, seconds: float) -> None:
        """Learn later how good this forecast is, which was just made for the sequence that is added next."""
        self._expected_s[sequence_id] = seconds / self._margin

    def learn(self, sequence_id: int, seconds: float) -> None:
        """Take how long the first token of a sequence took after its arrival."""
        expected_s = self._expected_s.pop(sequence_id, 0.0)
        if expected_s >= _LEAST_S:
            is_late = seconds > self._margin * expected_s
            self._margin = min(_MOST, max(1.0, self._margin * (_RAISE if is_late else _LOWER)))

    def forget(self, sequence_id: int) -> None:
        """Learn nothing from this sequence, which has ended."""
        self._expected_s.pop(sequence_id, None)

    def _likely_seconds(self, sequence: Sequence) -> float:
        scheduler = self._scheduler
        num_own, num_own_tokens = self._ahead_in_tenant(sequence)
        tenant = scheduler.tenants.get(sequence.tenant)
        num_tenants = len(scheduler.tenants) + (tenant is None)
        num_ahead = min(len(scheduler.waiting), num_own * num_tenants)
        num_tokens = min(scheduler.waiting.num_tokens, num_own_tokens * num_tenants)
        num_tokens += sum(
            each.next_end - each.next_start
            for each in scheduler.running
            if each.next_end - each.next_start > 1
        )
        num_slots = scheduler.limits.max_num_seqs
        num_free = num_slots - len(scheduler.running)
        if num_tenants > 1:
            # Others give up slots to a tenant that has less than its share.
            num_held = 0 if tenant is None else tenant.num_running
            num_free = max(num_free, max(1, num_slots // num_tenants) - num_held)
        num_missing = sequence.num_tokens - scheduler.kv_cache.num_cached_tokens(sequence)
        return max(
            self._prompt_tokens.seconds_for(num_tokens),
            self._admissions.seconds_for(num_ahead + 1 - num_free),
        ) + self._prompt_tokens.seconds_for(num_missing)

    def _ahead_in_tenant(self, sequence: Sequence) -> tuple[int, int]:
        """How many sequences and known tokens of its tenant wait before this one."""
        key = (self._scheduler.policy.rank(sequence), sequence.sequence_id)
        ahead = [each for each in self._scheduler.waiting.of_tenant(sequence.tenant) if rank_key(each) < key]
        return len(ahead), sum(each.num_tokens for each in ahead)
