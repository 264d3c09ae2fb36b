"""Equal shares for tenants.

Each tenant has a counter of the tokens computed for it, and the smallest counter goes first
(virtual token counters, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
A virtual time runs beside the counters: in every step it grows by the step's tokens divided by the
number of tenants present, as each counter would if the shares were exact (Parekh and Gallager, 1993).
When a tenant with nothing waiting sends a request, its counter is raised to the virtual time if it is
below: so a tenant cannot save up shares by idling, nor lose a debt by leaving.

Why no tenant starves: the counters of newcomers start at the virtual time, not below. A tenant whose
counter exceeds it by n tokens is overtaken by newcomers only until n tokens have been computed for
each tenant present; then it comes before all newcomers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from naiad.scheduler.policies import rank_key
from naiad.sequence import Sequence


@dataclass(slots=True)
class Tenant:
    """A tenant with live sequences.

    Attributes:
        num_live: number of its sequences.
        num_running: how many of them hold a slot.
        num_served_tokens: the virtual token counter.
        num_skipped_tokens: by how much the counter was raised; no token was computed for that.
    """

    num_live: int = 0
    num_running: int = 0
    num_served_tokens: float = 0.0
    num_skipped_tokens: float = 0.0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed for it, drafts included, since it last began to have sequences."""
        return round(self.num_served_tokens - self.num_skipped_tokens)


class Tenants:
    """All tenants with live sequences, by name, and the debts of tenants without."""

    def __init__(self) -> None:
        """Start without any."""
        self._tenants: dict[str, Tenant] = {}
        self._virtual_time = 0.0
        # Counters above the virtual time, and the same as a heap; each is dropped when the time reaches it.
        self._debts: dict[str, float] = {}
        self._due_debts: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """How many tenants have live sequences."""
        return len(self._tenants)

    def __iter__(self) -> Iterator[tuple[str, Tenant]]:
        """Iterate over those that have live sequences, with their names."""
        return iter(self._tenants.items())

    def get(self, name: str) -> Tenant | None:
        """The tenant of this name; None if it has no live sequences."""
        return self._tenants.get(name)

    def of(self, sequence: Sequence) -> Tenant:
        """A live sequence's tenant."""
        return self._tenants[sequence.tenant]

    def enter(self, sequence: Sequence) -> None:
        """Count a new sequence, which waits."""
        name = sequence.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            debt = self._debts.pop(name, 0.0)
            tenant = self._tenants[name] = Tenant(num_served_tokens=debt, num_skipped_tokens=debt)
        if tenant.num_live == tenant.num_running:
            num_before = tenant.num_served_tokens
            tenant.num_served_tokens = max(num_before, self._virtual_time)
            tenant.num_skipped_tokens += tenant.num_served_tokens - num_before
        tenant.num_live += 1

    def leave(self, sequence: Sequence) -> None:
        """Count a sequence that has ended; it no longer runs."""
        name = sequence.tenant
        tenant = self._tenants[name]
        tenant.num_live -= 1
        if tenant.num_live == 0:
            del self._tenants[name]
            if tenant.num_served_tokens > self._virtual_time:
                self._debts[name] = tenant.num_served_tokens
                heapq.heappush(self._due_debts, (tenant.num_served_tokens, name))

    def pass_step(self, num_tokens: int) -> None:
        """Advance the virtual time by a step of this many tokens."""
        self._virtual_time += num_tokens / max(1, len(self._tenants))
        while self._due_debts and self._due_debts[0][0] <= self._virtual_time:
            num_served_tokens, name = heapq.heappop(self._due_debts)
            # The tenant may have returned and left with a newer debt.
            if self._debts.get(name) == num_served_tokens:
                del self._debts[name]

    def order(self, sequence: Sequence) -> tuple[float, int, float, int]:
        """The sort key across tenants: least served first, then fewest running sequences, then rank."""
        tenant = self.of(sequence)
        return (tenant.num_served_tokens, tenant.num_running, *rank_key(sequence))

    def share(self, max_num_seqs: int) -> int:
        """Number of slots that each tenant is entitled to, at least one."""
        return max(1, max_num_seqs // max(1, len(self._tenants)))

    def is_owed(self, sequence: Sequence, max_num_seqs: int) -> bool:
        """Whether a waiting sequence's tenant competes with others and has less than its share of slots."""
        return len(self) > 1 and self.of(sequence).num_running < self.share(max_num_seqs)

    def without_excess(self, running: list[Sequence], max_num_seqs: int, is_pausing: bool) -> list[Sequence]:
        """Running sequences that are scheduled in a step reserved for an under-served tenant, by rank.

        Args:
            running: all running sequences, by rank.
            max_num_seqs: number of slots.
            is_pausing: tenants above their share have no rows in this step; otherwise they have as many
                as their share.
        """
        share = self.share(max_num_seqs)
        num_left = {
            name: 0 if is_pausing and tenant.num_running > share else share
            for name, tenant in self._tenants.items()
        }
        chosen = []
        for sequence in running:
            if num_left[sequence.tenant]:
                num_left[sequence.tenant] -= 1
                chosen.append(sequence)
        return chosen
