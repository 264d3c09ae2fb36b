"""The log of changes agrees with what lookups find, whatever happens."""

from __future__ import annotations

import random

import pytest

from helpers.kv_traffic import KVTraffic
from naiad.kv_cache.cache_log import CacheLog, ChangeKind
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.prefix_cache import CachedBlock, PrefixCache
from naiad.sequence import PrefixIdentity

ROOT = PrefixIdentity()


def cache_and_log(block_size: int = 2) -> tuple[PrefixCache, CacheLog]:
    log = CacheLog()
    return PrefixCache(block_size, observer=log), log


def insert_text(cache: PrefixCache, token_ids: list[int], block_ids: list[int]) -> list[CachedBlock]:
    chain: list[CachedBlock] = []
    for index, block_id in enumerate(block_ids):
        parent = chain[-1] if chain else None
        chain.append(cache.insert(parent, ROOT, token_ids, 2 * index, [block_id]))
    return chain


def test_new_blocks_are_stored_once_and_in_order() -> None:
    cache, log = cache_and_log()
    chain = insert_text(cache, [1, 2, 3, 4], [7, 8])
    insert_text(cache, [1, 2, 3, 4], [5, 6])
    assert log.take() == [(ChangeKind.STORED, each) for each in chain]
    assert log.take() == []
    assert log.findable() == chain


def test_a_block_is_removed_with_what_follows_it() -> None:
    cache, log = cache_and_log()
    first, second, third = insert_text(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    log.take()
    cache.evict(8)
    assert log.take() == [(ChangeKind.REMOVED, third), (ChangeKind.REMOVED, second)]
    assert log.findable() == [first]
    cache.evict(9)
    assert log.take() == []


def test_what_comes_behind_a_lost_block_is_not_stored() -> None:
    cache, log = cache_and_log()
    first = insert_text(cache, [1, 2], [7])[0]
    cache.evict(7)
    log.take()
    behind = cache.insert(first, ROOT, [1, 2, 3, 4], 2, [8])
    assert cache.holds(8)
    assert log.take() == []
    # The same text from its start: lookups find these, and no longer the block that could not be found.
    again = insert_text(cache, [1, 2, 3, 4], [5, 6])
    assert behind not in again
    assert log.take() == [(ChangeKind.STORED, each) for each in again]
    assert cache.match([1, 2, 3, 4], ROOT, 4) == again


def found_by_walking(cache: PrefixCache, log: CacheLog) -> set[int]:
    """The entries that lookups reach: each has its digest in the table, and so has all before it."""
    table = cache._by_digest
    reached = set()
    for entry in table.values():
        block: CachedBlock | None = entry
        while block is not None and table.get(block.digest) is block:
            block = block.parent
        if block is None:
            reached.add(id(entry))
    return reached


@pytest.mark.parametrize("seed", range(30))
def test_log_agrees_with_the_index(seed: int) -> None:
    rng = random.Random(seed)
    windows = rng.choice(((None,), (None,), (None, 3), (5,), (2, 9)))
    block_size = rng.choice((1, 2, 3, 4))
    log = CacheLog()
    prefix_cache = PrefixCache(block_size, windows=windows, observer=log)
    specs = [KVGroupSpec(-(-40 // block_size), window) for window in windows]
    cache = KVCacheManager(specs, block_size, prefix_cache, max_step_tokens=8)
    traffic = KVTraffic(seed, cache)
    copy: dict[CachedBlock, None] = {}
    num_removed = 0
    for _ in range(300):
        traffic.operate()
        for kind, block in log.take():
            if kind is ChangeKind.STORED:
                assert block.parent is None or block.parent in copy
                assert block not in copy
                copy[block] = None
            else:
                del copy[block]
                num_removed += 1
        assert list(copy) == log.findable()
        assert {id(block) for block in copy} == found_by_walking(prefix_cache, log)
    for salt, token_ids in sorted(traffic.texts):
        found = prefix_cache.match(token_ids, PrefixIdentity(salt), len(token_ids))
        assert copy.keys() >= set(found)
    assert num_removed > 20
