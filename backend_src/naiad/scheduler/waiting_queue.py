"""Sequences that wait for a slot and blocks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from naiad.scheduler.policies import rank_key
from naiad.scheduler.tenants import Tenants
from naiad.sequence import Sequence


class WaitingQueue:
    """Each tenant's sequences by rank; members can leave from anywhere.

    Attributes:
        num_tokens: known ones of all members.
        num_paused: members that have been preempted.
    """

    def __init__(self, tenants: Tenants) -> None:
        """Start empty."""
        self._tenants = tenants
        self._lines: dict[str, list[Sequence]] = {}
        self._num_sequences = 0
        self.num_tokens = 0
        self.num_paused = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant, in each from the next to the last."""
        for line in self._lines.values():
            yield from line

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its rank belongs."""
        line = self._lines.setdefault(sequence.tenant, [])
        bisect.insort(line, sequence, key=rank_key)
        self._num_sequences += 1
        self.num_tokens += sequence.num_tokens
        self.num_paused += sequence.num_preemptions > 0

    def first(self, is_ready: Callable[[Sequence], bool], max_num_seqs: int) -> Sequence | None:
        """The next one that is ready; stays in the queue.

        Tenants with less than their share of the slots come first, whatever was computed for them:
        one that was served less but holds its share would only bar their way. Of equals the tenant
        that was served least.
        """
        heads = (next(filter(is_ready, line), None) for line in self._lines.values())
        return min(
            (head for head in heads if head is not None),
            key=lambda head: (not self._tenants.is_owed(head, max_num_seqs), self._tenants.order(head)),
            default=None,
        )

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        line = self._lines[sequence.tenant]
        index = bisect.bisect_left(line, rank_key(sequence), key=rank_key)
        assert line[index] is sequence, "the sequence does not wait"
        del line[index]
        if not line:
            del self._lines[sequence.tenant]
        self._num_sequences -= 1
        self.num_tokens -= sequence.num_tokens
        self.num_paused -= sequence.num_preemptions > 0
