"""What every source of draft tokens looks like."""

from __future__ import annotations

from typing import Protocol

from naiad.sequence import Sequence


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """At most `num_tokens` ids that may follow the known tokens; may be empty."""
