"""Equal shares for tenants.

Each tenant has a counter of the tokens computed for it, and the smallest counter goes first
(virtual token counters, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
Beside them runs a virtual time: with every step it grows by the step's tokens over the tenants
present, as each counter would if the shares were exact (Parekh and Gallager, 1993). A tenant that has
nothing waiting and sends something is put at the virtual time, unless its counter is ahead of it:
nobody saves up, and nobody loses a debt by going away.

Why no tenant starves: newcomers start at the virtual time, not below. A tenant that is n tokens
ahead of it is passed by newcomers only until n tokens have been computed for each tenant present,
and then it is before everybody who comes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from naiad.scheduler.policies import rank_key
from naiad.sequence import Sequence


@dataclass(slots=True)
class Tenant:
    """A tenant with live sequences.

    Attributes:
        num_live: its sequences.
        num_running: of those, the ones that hold a slot.
        num_served_tokens: the virtual counter.
    """

    num_live: int = 0
    num_running: int = 0
    num_served_tokens: float = 0.0


class Tenants:
    """All tenants with live sequences, by name, and the debts of those without."""

    def __init__(self) -> None:
        """Start without any."""
        self._tenants: dict[str, Tenant] = {}
        self._virtual_time = 0.0
        # Counters ahead of the virtual time, and the same as a heap; forgotten when it passes them.
        self._debts: dict[str, float] = {}
        self._due_debts: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """How many tenants have live sequences."""
        return len(self._tenants)

    @property
    def num_debts(self) -> int:
        """Tenants without live sequences whose counter is kept."""
        return len(self._debts)

    def of(self, sequence: Sequence) -> Tenant:
        """A live sequence's tenant."""
        return self._tenants[sequence.tenant]

    def enter(self, sequence: Sequence) -> None:
        """A sequence comes, to wait."""
        name = sequence.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(num_served_tokens=self._debts.pop(name, 0.0))
        if tenant.num_live == tenant.num_running:
            tenant.num_served_tokens = max(tenant.num_served_tokens, self._virtual_time)
        tenant.num_live += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        name = sequence.tenant
        tenant = self._tenants[name]
        tenant.num_live -= 1
        if tenant.num_live == 0:
            del self._tenants[name]
            if tenant.num_served_tokens > self._virtual_time:
                self._debts[name] = tenant.num_served_tokens
                heapq.heappush(self._due_debts, (tenant.num_served_tokens, name))

    def pass_step(self, num_tokens: int) -> None:
        """A step of so many tokens has been made: the virtual time goes on."""
        self._virtual_time += num_tokens / max(1, len(self._tenants))
        while self._due_debts and self._due_debts[0][0] <= self._virtual_time:
            num_served_tokens, name = heapq.heappop(self._due_debts)
            # Another one if the tenant has been back.
            if self._debts.get(name) == num_served_tokens:
                del self._debts[name]

    def order(self, sequence: Sequence) -> tuple[float, int, float, int]:
        """Between tenants the one served least, of equals the one that runs least; then the rank."""
        tenant = self.of(sequence)
        return (tenant.num_served_tokens, tenant.num_running, *rank_key(sequence))

    def share(self, max_num_seqs: int) -> int:
        """Slots that each tenant may hold whatever the others want, at least one."""
        return max(1, max_num_seqs // max(1, len(self._tenants)))

    def is_owed(self, sequence: Sequence, max_num_seqs: int) -> bool:
        """Whether a waiting sequence's tenant has others beside it and less than its share of slots."""
        return len(self) > 1 and self.of(sequence).num_running < self.share(max_num_seqs)

    def without_excess(self, running: list[Sequence], max_num_seqs: int, is_pausing: bool) -> list[Sequence]:
        """Running sequences that are scheduled in a step reserved for an under-served tenant, by rank.

        Args:
            running: by rank.
            max_num_seqs: slots.
            is_pausing: tenants that run more than their share have none, else as many as their share.
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
