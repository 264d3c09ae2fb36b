"""Equal shares for tenants.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
each tenant has a counter of the tokens computed for it, and the smallest counter goes first. A
tenant that comes back starts at the smallest counter of those present, so nobody saves up.
"""

from __future__ import annotations

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
    num_served_tokens: int = 0


class Tenants:
    """All tenants with live sequences, by their salt; others leave no trace."""

    def __init__(self) -> None:
        """Start without any."""
        self._tenants: dict[str, Tenant] = {}

    def __len__(self) -> int:
        """How many tenants have live sequences."""
        return len(self._tenants)

    def of(self, sequence: Sequence) -> Tenant:
        """A live sequence's tenant."""
        return self._tenants[sequence.cache_salt]

    def enter(self, sequence: Sequence) -> None:
        """A sequence comes."""
        tenant = self._tenants.get(sequence.cache_salt)
        if tenant is None:
            counters = (other.num_served_tokens for other in self._tenants.values())
            tenant = Tenant(num_served_tokens=min(counters, default=0))
            self._tenants[sequence.cache_salt] = tenant
        tenant.num_live += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        tenant = self._tenants[sequence.cache_salt]
        tenant.num_live -= 1
        if tenant.num_live == 0:
            del self._tenants[sequence.cache_salt]

    def order(self, sequence: Sequence) -> tuple[int, int, float, int]:
        """Between tenants the one served least, of equals the one that runs least; then the rank."""
        tenant = self.of(sequence)
        return (tenant.num_served_tokens, tenant.num_running, *rank_key(sequence))

    def share(self, max_num_seqs: int) -> int:
        """Slots that each tenant may hold whatever the others want, at least one."""
        return max(1, max_num_seqs // max(1, len(self._tenants)))

    def is_owed(self, sequence: Sequence, max_num_seqs: int) -> bool:
        """Whether a waiting sequence's tenant has others beside it and less than its share of slots."""
        return len(self) > 1 and self.of(sequence).num_running < self.share(max_num_seqs)

    def within_share(self, running: list[Sequence], max_num_seqs: int) -> list[Sequence]:
        """Of those that run, by rank, each tenant's first ones, as many as its share."""
        num_left = dict.fromkeys(self._tenants, self.share(max_num_seqs))
        chosen = []
        for sequence in running:
            if num_left[sequence.cache_salt]:
                num_left[sequence.cache_salt] -= 1
                chosen.append(sequence)
        return chosen
