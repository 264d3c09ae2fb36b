"""Decides with which chunks the detokenizer asks whether the client is still there."""

from __future__ import annotations

import time
from collections.abc import Callable

# To ask is an IPC round trip. A client that has gone is noticed with the next chunk after this time, or by a
# probe if no chunk comes.
ROUND_S = 0.06


class CheckRounds:
    """Asks with the first chunk of each sequence in every round. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first round; `clock` returns the time in seconds."""
        self._clock = clock
        self._began_s = clock()
        self._asked: set[int] = set()

    def is_due(self, sequence_id: int) -> bool:
        """Whether to ask with this chunk of the sequence."""
        now_s = self._clock()
        if now_s - self._began_s >= ROUND_S:
            self._began_s = now_s
            self._asked.clear()
        if sequence_id in self._asked:
            return False
        self._asked.add(sequence_id)
        return True
