from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers.drafts import draft_sequence
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import Sequence
from naiad.speculation.draft_slots import DraftSlots

BLOCK = 4


def admitted(kv_cache: KVCacheManager, token_ids: list[int]) -> Sequence:
    sequence = draft_sequence(token_ids)
    assert kv_cache.admit(sequence) is not None
    kv_cache.publish(sequence, len(token_ids))
    return sequence


def test_all_known_tokens_are_missing_at_first_and_the_last_one_always() -> None:
    kv_cache = KVCacheManager(8, BLOCK)
    slots = DraftSlots(kv_cache)
    sequence = admitted(kv_cache, list(range(10)))
    assert (slots.missing(sequence), slots.num_missing(sequence)) == ((0, 10), 9)
    slots.fill(sequence, 0, 6)
    assert (slots.missing(sequence), slots.num_missing(sequence)) == ((6, 10), 3)
    slots.fill(sequence, 6, 10)
    assert (slots.missing(sequence), slots.num_missing(sequence)) == ((9, 10), 0)


@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.integers(0, 29), st.integers(1, 9))))
def test_what_is_missing_is_what_was_not_written(
    num_tokens: int, changes: list[tuple[bool, int, int]]
) -> None:
    """Compared with a set of written slots, in which a block's slots after a gap do not count."""
    kv_cache = KVCacheManager(8, BLOCK)
    slots = DraftSlots(kv_cache)
    sequence = admitted(kv_cache, list(range(num_tokens)))
    written: set[int] = set()
    for is_read, begin, size in changes:
        start, end = slots.missing(sequence)
        if is_read:
            end = min(end, start + size)
            slots.fill(sequence, start, end)
            written |= set(range(start, end))
        elif begin < num_tokens:
            end = min(begin + size, num_tokens)
            slots.empty(sequence, begin, end)
            blocks = range(begin // BLOCK, -(-end // BLOCK))
            written -= {
                place for block in blocks for place in range(max(begin, block * BLOCK), (block + 1) * BLOCK)
            }
        start, end = slots.missing(sequence)
        places = [place for place in range(num_tokens) if place not in written] or [num_tokens - 1]
        assert start == min(places)
        assert end > start
        assert written.isdisjoint(range(start, min(end, num_tokens - 1)))
        assert end == num_tokens or end in written


def test_a_block_that_gets_other_tokens_has_none() -> None:
    kv_cache = KVCacheManager(2, BLOCK)
    slots = DraftSlots(kv_cache)
    first = admitted(kv_cache, list(range(8)))
    slots.fill(first, 0, 8)
    kv_cache.free(first)
    second = admitted(kv_cache, list(range(20, 28)))
    assert slots.missing(second) == (0, 8)


def test_a_prefix_hit_brings_what_was_written_there() -> None:
    kv_cache = KVCacheManager(8, BLOCK, PrefixCache(BLOCK))
    slots = DraftSlots(kv_cache)
    first = admitted(kv_cache, list(range(10)))
    slots.fill(first, 0, 6)
    kv_cache.free(first)
    second = admitted(kv_cache, [*range(8), 50, 51, 52])
    assert slots.missing(second) == (6, 11)
    # The first sequence that reads the block reads it for all.
    third = admitted(kv_cache, [*range(8), 60])
    slots.fill(third, 6, 8)
    assert slots.missing(second) == (8, 11)


def test_a_hole_is_read_up_to_what_is_there() -> None:
    kv_cache = KVCacheManager(8, BLOCK)
    slots = DraftSlots(kv_cache)
    sequence = admitted(kv_cache, list(range(14)))
    slots.fill(sequence, 0, 14)
    slots.empty(sequence, 5, 8)
    assert slots.missing(sequence) == (5, 8)


def test_a_sibling_reads_its_copied_block_itself() -> None:
    kv_cache = KVCacheManager(8, BLOCK)
    slots = DraftSlots(kv_cache)
    donor = admitted(kv_cache, list(range(7)))
    slots.fill(donor, 0, 7)
    donor.num_computed_tokens = 7
    sibling = draft_sequence(list(range(7)))
    assert kv_cache.fork(sibling, donor) == 6
    assert slots.missing(sibling) == (4, 7)
