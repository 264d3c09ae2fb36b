"""What tenants of an `EngineDrive` should be charged, computed from its block tables alone."""

from __future__ import annotations

from collections import Counter

import pytest

from helpers.engine_drive import EngineDrive
from naiad.kv_cache.prefix_cache import NO_BLOCK
from naiad.snapshot import tenant_label


class ExpectedAccounts:
    """Adds up block seconds while a test passes the time."""

    def __init__(self, drive: EngineDrive) -> None:
        self._drive = drive
        self._block_s: Counter[str] = Counter()
        self._used_block_s = 0.0

    def pass_time(self, seconds: float) -> None:
        """Advance the drive's clock."""
        scheduler = self._drive.scheduler
        for sequence in (*scheduler.running, *scheduler.leaving.values()):
            for group, table in zip(scheduler.kv_cache.groups, sequence.block_tables, strict=True):
                held = (each for each in table if each != NO_BLOCK)
                self._block_s[tenant_label(sequence.tenant)] += seconds * sum(
                    1 / group.pool.ref_count(each) for each in held
                )
        self._used_block_s += seconds * scheduler.kv_cache.num_used_blocks
        self._drive.now += seconds

    def check(self) -> None:
        """Compare; the test has advanced the clock by `pass_time` alone, but for microseconds."""
        engine = self._drive.engine
        usages, stats = engine.usages(), engine.stats()
        found = {each.tenant: each.block_s for each in usages if each.block_s > 0.01}
        expected = {tenant: block_s for tenant, block_s in self._block_s.items() if block_s > 0.01}
        assert found == pytest.approx(expected, rel=1e-3)
        assert sum(found.values()) == pytest.approx(self._used_block_s, rel=1e-3, abs=0.1)
        assert sum(each.num_prompt_tokens for each in usages) == stats.total_prompt_tokens
        assert sum(each.num_output_tokens for each in usages) == stats.total_generation_tokens
        # Drafts of sequences that fail or end meanwhile were computed too.
        assert sum(each.num_draft_tokens for each in usages) >= stats.total_draft_tokens
