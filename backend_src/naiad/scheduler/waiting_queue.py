"""Sequences that wait for a slot and blocks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator

from naiad.scheduler.policies import rank_key
from naiad.scheduler.tenants import Tenants
from naiad.sequence import Sequence


class WaitingQueue:
    """Each tenant's waiting sequences by rank; a sequence can be removed from any place.

    Attributes:
        num_tokens: known tokens of all waiting sequences.
        num_paused: number of waiting sequences that have been preempted.
    """

    def __init__(self, tenants: Tenants) -> None:
        """Start empty."""
        self._tenants = tenants
        self._lines: dict[str, list[Sequence]] = {}
        self._num_sequences = 0
        self.num_tokens = 0
        self.num_paused = 0

    def __len__(self) -> int:
        """Number of waiting sequences."""
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate tenant by tenant, each in the order of ranks."""
        for line in self._lines.values():
            yield from line

    def of_tenant(self, name: str) -> Iterable[Sequence]:
        """A tenant's waiting sequences in the order of ranks."""
        return self._lines.get(name, ())

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by its rank."""
        line = self._lines.setdefault(sequence.tenant, [])
        bisect.insort(line, sequence, key=rank_key)
        self._num_sequences += 1
        self.num_tokens += sequence.num_tokens
        self.num_paused += sequence.num_preemptions > 0

    def first(self, is_ready: Callable[[Sequence], bool], max_num_seqs: int) -> Sequence | None:
        """The next sequence that is ready; it stays in the queue.

        Tenants with less than their share of the slots come first, regardless of their counters: a
        tenant that was served less but holds its share would only block them. Among equals the tenant
        that was served least comes first.
        """
        heads = (next(filter(is_ready, line), None) for line in self._lines.values())
        return min(
            (head for head in heads if head is not None),
            key=lambda head: (not self._tenants.is_owed(head, max_num_seqs), self._tenants.order(head)),
            default=None,
        )

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its place in the queue."""
        line = self._lines[sequence.tenant]
        index = bisect.bisect_left(line, rank_key(sequence), key=rank_key)
        assert line[index] is sequence, "the sequence does not wait"
        del line[index]
        if not line:
            del self._lines[sequence.tenant]
        self._num_sequences -= 1
        self.num_tokens -= sequence.num_tokens
        self.num_paused -= sequence.num_preemptions > 0
