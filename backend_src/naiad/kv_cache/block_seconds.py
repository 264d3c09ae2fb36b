"""How long tenants hold KV blocks; a block that several tenants hold is divided among its holders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Shares of blocks add up to whole blocks but for rounding.
_ROUNDING = 1e-6


@dataclass(slots=True)
class _Meter:
    """A tenant's block seconds until `since_s`, and the blocks that it has held from then on."""

    since_s: float
    num_blocks: float = 0.0
    block_s: float = 0.0


class BlockSeconds:
    """Adds up, for each tenant, the blocks that it holds times the seconds that it holds them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with nothing held.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        self._meters: dict[str, _Meter] = {}

    def change(self, tenant: str, num_blocks: float) -> None:
        """Let a tenant hold this many blocks more from now on, or fewer if it is negative."""
        now_s = self._clock()
        meter = self._meters.get(tenant)
        if meter is None:
            meter = self._meters[tenant] = _Meter(now_s)
        meter.block_s += meter.num_blocks * (now_s - meter.since_s)
        meter.since_s = now_s
        meter.num_blocks += num_blocks

    def take(self) -> dict[str, float]:
        """Return the block seconds since the last call, for each tenant that has held blocks."""
        now_s, taken = self._clock(), {}
        for tenant, meter in list(self._meters.items()):
            taken[tenant] = meter.block_s + meter.num_blocks * (now_s - meter.since_s)
            meter.block_s, meter.since_s = 0.0, now_s
            if meter.num_blocks < _ROUNDING:
                del self._meters[tenant]
        return taken


class BlockHolders:
    """Who holds each block of a pool, as far as `BlockSeconds` needs to know."""

    def __init__(self, seconds: BlockSeconds) -> None:
        """Start with free blocks.

        Args:
            seconds: is told of every change.
        """
        self._seconds = seconds
        # For each block that is held, how many of its holders are of each tenant.
        self._holders: dict[int, dict[str, int]] = {}

    def hold(self, block_id: int, tenant: str) -> None:
        """Add a holder."""
        holders = self._holders.get(block_id)
        if holders is None:
            self._holders[block_id] = {tenant: 1}
            self._seconds.change(tenant, 1)
        elif len(holders) == 1 and tenant in holders:
            holders[tenant] += 1
        else:
            self._divide(holders, tenant, 1)

    def leave(self, block_id: int, tenant: str) -> None:
        """Remove a holder."""
        holders = self._holders[block_id]
        if len(holders) > 1:
            self._divide(holders, tenant, -1)
        elif holders[tenant] > 1:
            holders[tenant] -= 1
        else:
            del self._holders[block_id]
            self._seconds.change(tenant, -1)

    def _divide(self, holders: dict[str, int], tenant: str, change: int) -> None:
        """Change the number of holders of a block that is, or was, held by several tenants."""
        num_before = sum(holders.values())
        before = {each: count / num_before for each, count in holders.items()}
        holders[tenant] = holders.get(tenant, 0) + change
        for each, count in holders.items():
            self._seconds.change(each, count / (num_before + change) - before.get(each, 0.0))
        if not holders[tenant]:
            del holders[tenant]
