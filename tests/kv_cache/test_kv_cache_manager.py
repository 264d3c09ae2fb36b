from __future__ import annotations

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.sequence import SamplingParams, Sequence


def make_sequence(num_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=1)
    return Sequence(
        sequence_id=1,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        params=params,
        arrival_s=0.0,
    )


def test_admit_gives_blocks_for_all_known_tokens() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=4)
    sequence = make_sequence(9)
    assert cache.admit(sequence) == 0
    assert sequence.block_table == [0, 1, 2]
    assert (cache.num_free_blocks, cache.num_used_blocks) == (1, 3)


def test_admit_without_room_changes_nothing() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=4)
    sequence = make_sequence(9)
    assert cache.admit(sequence) is None
    assert sequence.block_table == []
    assert cache.num_free_blocks == 2


def test_allocate_takes_a_block_only_past_the_edge() -> None:
    cache = KVCacheManager(num_blocks=3, block_size=4)
    sequence = make_sequence(4)
    cache.admit(sequence)
    assert cache.allocate(sequence, 4)
    assert sequence.block_table == [0]
    assert cache.allocate(sequence, 5)
    assert sequence.block_table == [0, 1]


def test_allocate_without_room_changes_nothing() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=4)
    sequence = make_sequence(4)
    cache.admit(sequence)
    assert not cache.allocate(sequence, 13)
    assert sequence.block_table == [0]
    assert cache.num_free_blocks == 1


def test_free_gives_the_first_block_to_the_next_owner() -> None:
    cache = KVCacheManager(num_blocks=6, block_size=4)
    keeper, leaver, next_one = make_sequence(4), make_sequence(8), make_sequence(4)
    cache.admit(keeper)
    cache.admit(leaver)
    first = leaver.block_table[0]
    cache.free(leaver)
    assert leaver.block_table == []
    cache.admit(next_one)
    assert next_one.block_table == [first]


class _Remembering:
    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = block_ids

    def lookup(self, token_ids: list[int]) -> list[int]:
        return self.block_ids


def test_admit_shares_the_blocks_of_a_cached_prefix() -> None:
    prefix_cache = _Remembering([])
    cache = KVCacheManager(4, 4, prefix_cache)
    first, second = make_sequence(8), make_sequence(9)
    cache.admit(first)
    prefix_cache.block_ids = list(first.block_table)
    assert cache.admit(second) == 8
    assert second.block_table == [0, 1, 2]
    cache.free(first)
    assert cache.num_free_blocks == 1


def test_admit_counts_cached_blocks_that_are_free_as_needed() -> None:
    cache = KVCacheManager(3, 4, _Remembering([1]))
    other, sequence = make_sequence(4), make_sequence(12)
    assert cache.allocate(other, 4)
    assert cache.admit(sequence) is None
    assert cache.num_free_blocks == 2
