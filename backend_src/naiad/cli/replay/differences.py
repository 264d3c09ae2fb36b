"""Compares what requests gave now with what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naiad.recording.record import RecordedOutput
from naiad.sequence import FinishReason

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
_SHOWN_BEFORE = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a sequence differs from its record.

    Attributes:
        line: the request's line in the file.
        sequence: the sequence's index.
        place: the token's index in the output.
        recorded, played: the ids there; None: the output has ended before.
        before: the ids before it, at most five.
    """

    line: int
    sequence: int
    place: int
    recorded: int | None
    played: int | None
    before: tuple[int, ...]

    def __str__(self) -> str:
        """Say where and what."""
        after = f" after {', '.join(map(str, self.before))}" if self.before else ""
        shown = ["the end" if each is None else f"id {each}" for each in (self.played, self.recorded)]
        return (
            f"line {self.line}, sequence {self.sequence}, output token {self.place}{after}: "
            f"{shown[0]}, recorded was {shown[1]}"
        )


def difference_of(
    line: int, expected: Sequence[RecordedOutput], played: Sequence[Sequence[int]]
) -> Difference | None:
    """Return the first difference of a request's sequences; None: they are the same.

    A sequence that was cancelled, timed out or failed need only begin with what was recorded.
    """
    for sequence, (recorded, now) in enumerate(zip(expected, played, strict=True)):
        ids = recorded.token_ids or []
        num_compared = max(len(ids), len(now)) if recorded.finish_reason in _WHOLE else len(ids)
        for place in range(num_compared):
            was = ids[place] if place < len(ids) else None
            is_now = now[place] if place < len(now) else None
            if was != is_now:
                before = tuple(ids[max(0, place - _SHOWN_BEFORE) : place])
                return Difference(line, sequence, place, was, is_now, before)
    return None
