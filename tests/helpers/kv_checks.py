"""The invariants of a KV cache's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroup
from naiad.kv_cache.prefix_cache import NO_BLOCK
from naiad.sequence import Sequence


def check_blocks(
    kv_cache: KVCacheManager, holders: Iterable[Sequence], num_written: Mapping[int, int]
) -> None:
    """Assert that every group's pool agrees with the tables that hold its blocks.

    Args:
        kv_cache: the manager, between any two calls.
        holders: all sequences with blocks.
        num_written: sequence id → number of tokens that are computed or scheduled; other sequences are
            not checked for blocks that are both shared and written.
    """
    holders = list(holders)
    for group in kv_cache.groups:
        _check_pool(group, holders)
        for sequence in holders:
            table = sequence.block_tables[group.index]
            assert len(table) * kv_cache.block_size >= sequence.num_computed_tokens
            if sequence.sequence_id in num_written:
                first_unwritten = num_written[sequence.sequence_id] // kv_cache.block_size
                # Only full blocks are shared, from the step that fills them.
                for block_id in table[first_unwritten:]:
                    assert group.pool.ref_count(block_id) == 1, f"block {block_id} is shared and written"


def _check_pool(group: KVGroup, holders: list[Sequence]) -> None:
    pool = group.pool
    owners: Counter[int] = Counter()
    for sequence in holders:
        table = sequence.block_tables[group.index]
        held = [block_id for block_id in table if block_id != NO_BLOCK]
        num_left = len(table) - len(held)
        assert len(set(held)) == len(held), "a block is twice in a table"
        assert NO_BLOCK not in table[num_left:], "a block is missing in the middle of a table"
        assert num_left <= group.first_seen(sequence.num_computed_tokens), "a window lacks blocks"
        owners.update(held)
    for block_id in range(pool.num_blocks):
        assert pool.ref_count(block_id) == owners[block_id], f"block {block_id} is counted wrongly"
    free = pool.free_block_ids()
    assert len(free) == len(set(free)) == pool.num_free
    assert not owners.keys() & set(free), "a block is both free and held"
    assert len(free) + len(owners) == pool.num_blocks, "a block is lost"
