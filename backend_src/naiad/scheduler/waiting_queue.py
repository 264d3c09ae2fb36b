"""Sequences that wait for a slot and blocks, first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from naiad.sequence import Sequence


class WaitingQueue:
    """A queue whose members can leave from anywhere; every operation is O(1)."""

    def __init__(self) -> None:
        """Start empty."""
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """From the next to the last."""
        return iter(self._sequences.values())

    def append(self, sequence: Sequence) -> None:
        """A new sequence: behind all others."""
        self._sequences[sequence.sequence_id] = sequence

    def prepend(self, sequence: Sequence) -> None:
        """A preempted sequence: it is older than all that wait."""
        self._sequences[sequence.sequence_id] = sequence
        self._sequences.move_to_end(sequence.sequence_id, last=False)

    def first(self) -> Sequence:
        """The next one; stays in the queue."""
        return next(iter(self._sequences.values()))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._sequences[sequence.sequence_id]
