"""What the last steps computed and how long they took, kept for people who watch the engine."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from naiad.snapshot import Percentiles, StepSummary

# Steps that are remembered, and how many of them a snapshot lists.
_NUM_STEPS = 1024
NUM_LISTED_STEPS = 120
_NUM_FIRST_TOKENS = 512
_RATE_S = 5.0
_SHORTEST_RATE_S = 1.0
_LATENCY_S = 30.0


class _Kept(NamedTuple):
    """A step. What begins with `total` is counted from the engine's start to the step's end."""

    begin_s: float
    end_s: float
    num_prefill_tokens: int
    num_decode_rows: int
    total_draft_tokens: int
    total_accepted_tokens: int
    total_preemptions: int
    total_generation_tokens: int


_NOTHING = _Kept(0.0, 0.0, 0, 0, 0, 0, 0, 0)


class StepHistory:
    """A ring of steps. A step costs one tuple; everything else is computed for those who ask.

    Attributes:
        num_steps: number of steps so far.
    """

    def __init__(self) -> None:
        """Start without steps."""
        self.num_steps = 0
        self._steps: deque[tuple[float, float, int, int, int, int, int, int]] = deque(maxlen=_NUM_STEPS)
        # When each first token came, and how long after its sequence's arrival.
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_NUM_FIRST_TOKENS)

    def add(self, step: tuple[float, float, int, int, int, int, int, int]) -> None:
        """Add a step that has been computed: the fields of `_Kept`."""
        self.num_steps += 1
        self._steps.append(step)

    def add_first_token(self, now_s: float, waited_s: float) -> None:
        """Add a sequence's first token, which came this long after its arrival."""
        self._first_tokens.append((now_s, waited_s))

    def summaries(self) -> list[StepSummary]:
        """The last steps, the oldest first; at most `NUM_LISTED_STEPS`."""
        steps = self._last(NUM_LISTED_STEPS + 1)
        if len(steps) <= NUM_LISTED_STEPS:
            steps.insert(0, _NOTHING)
        return [_summary(before, step) for before, step in itertools.pairwise(steps)]

    def rates(self, now_s: float) -> tuple[float, float]:
        """Prompt tokens computed and new tokens in a second, over the last seconds."""
        recent, before = self._since(now_s - _RATE_S)
        if not recent:
            return 0.0, 0.0
        has_all = before is not None or self.num_steps == len(recent)
        seconds = _RATE_S if before is not None else min(_RATE_S, now_s - recent[0].begin_s)
        # The tokens of the oldest step are known only if the one before it is.
        base = before or (_NOTHING if has_all else recent[0])
        seconds = max(seconds, _SHORTEST_RATE_S)
        num_prefill_tokens = sum(step.num_prefill_tokens for step in recent)
        num_new_tokens = recent[-1].total_generation_tokens - base.total_generation_tokens
        return num_prefill_tokens / seconds, num_new_tokens / seconds

    def first_token(self, now_s: float) -> Percentiles:
        """Times to the first token."""
        recent = [waited_s for at_s, waited_s in self._first_tokens if at_s > now_s - _LATENCY_S]
        return _percentiles((waited_s, 1) for waited_s in recent)

    def inter_token(self, now_s: float) -> Percentiles:
        """Times between tokens: a sequence that decodes has been in the step before, too."""
        recent, before = self._since(now_s - _LATENCY_S)
        steps = [before, *recent] if before is not None else recent
        gaps = []
        for last, step in itertools.pairwise(steps):
            num_rows = step.num_decode_rows
            num_tokens = num_rows + max(0, step.total_accepted_tokens - last.total_accepted_tokens)
            if num_rows:
                gaps.append(((step.end_s - last.end_s) * num_rows / num_tokens, num_tokens))
        return _percentiles(gaps)

    def drafts(self, now_s: float) -> tuple[int, int]:
        """Draft tokens that were tried, and accepted, over the last half minute."""
        recent, before = self._since(now_s - _LATENCY_S)
        if not recent:
            return 0, 0
        last, base = recent[-1], before or (_NOTHING if self.num_steps == len(recent) else recent[0])
        num_drafts = last.total_draft_tokens - base.total_draft_tokens
        return num_drafts, min(num_drafts, max(0, last.total_accepted_tokens - base.total_accepted_tokens))

    def _last(self, number: int) -> list[_Kept]:
        start = max(0, len(self._steps) - number)
        return list(map(_Kept._make, itertools.islice(self._steps, start, None)))

    def _since(self, start_s: float) -> tuple[list[_Kept], _Kept | None]:
        """The steps that ended after this time, and the step before them if it is remembered."""
        steps = self._last(_NUM_STEPS)
        number = sum(step.end_s > start_s for step in steps)
        first = len(steps) - number
        return steps[first:], steps[first - 1] if first else None


def _summary(before: _Kept, step: _Kept) -> StepSummary:
    num_draft_tokens = step.total_draft_tokens - before.total_draft_tokens
    num_accepted_tokens = step.total_accepted_tokens - before.total_accepted_tokens
    return StepSummary(
        # A step that was launched during the one before it waited for it.
        duration_s=step.end_s - max(step.begin_s, before.end_s),
        num_prefill_tokens=step.num_prefill_tokens,
        num_decode_rows=step.num_decode_rows,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        num_preemptions=step.total_preemptions - before.total_preemptions,
    )


def _percentiles(times: Iterable[tuple[float, int]]) -> Percentiles:
    """The percentiles of times, each of which counts several times (nearest rank)."""
    ordered = sorted(times)
    count = sum(weight for _, weight in ordered)
    if not count:
        return Percentiles()
    return Percentiles(_at(ordered, 0.5 * count), _at(ordered, 0.95 * count), count)


def _at(ordered: list[tuple[float, int]], rank: float) -> float:
    """The time at this rank, among times in order."""
    passed = 0
    for time_s, weight in ordered:
        passed += weight
        if passed >= rank:
            return time_s
    raise AssertionError("a rank beyond the last time")
