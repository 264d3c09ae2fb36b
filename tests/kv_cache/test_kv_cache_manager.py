from __future__ import annotations

from itertools import count

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import PrefixIdentity, SamplingParams, Sequence

_ids = count(1)


def make_sequence(num_tokens: int, salt: str = "", first_id: int = 0) -> Sequence:
    return Sequence(
        sequence_id=next(_ids),
        token_ids=list(range(first_id, first_id + num_tokens)),
        num_prompt_tokens=num_tokens,
        params=SamplingParams(max_tokens=1),
        arrival_s=0.0,
        prefix_identity=PrefixIdentity(salt),
    )


def make_cache(num_blocks: int = 8, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, PrefixCache(block_size))


def compute(cache: KVCacheManager, sequence: Sequence) -> Sequence:
    """Admit a sequence and compute all its known tokens."""
    assert cache.admit(sequence) is not None
    cache.publish(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    return sequence


def test_admit_gives_blocks_for_all_known_tokens() -> None:
    cache = KVCacheManager(4, block_size=4)
    sequence = make_sequence(9)
    assert cache.admit(sequence) == 0
    assert sequence.block_table == [0, 1, 2]
    assert (cache.num_free_blocks, cache.num_used_blocks) == (1, 3)


def test_admit_without_room_changes_nothing() -> None:
    cache = KVCacheManager(2, block_size=4)
    sequence = make_sequence(9)
    assert cache.admit(sequence) is None
    assert sequence.block_table == []
    assert cache.num_free_blocks == 2


def test_allocate_takes_a_block_only_past_the_edge() -> None:
    cache = KVCacheManager(3, block_size=4)
    sequence = make_sequence(4)
    cache.admit(sequence)
    assert cache.allocate(sequence, 4)
    assert sequence.block_table == [0]
    assert cache.allocate(sequence, 5)
    assert sequence.block_table == [0, 1]


def test_allocate_without_room_changes_nothing() -> None:
    cache = KVCacheManager(2, block_size=4)
    sequence = make_sequence(4)
    cache.admit(sequence)
    assert not cache.allocate(sequence, 13)
    assert sequence.block_table == [0]
    assert cache.num_free_blocks == 1


def test_free_gives_the_first_block_to_the_next_owner() -> None:
    cache = KVCacheManager(6, block_size=4)
    keeper, leaver, next_one = make_sequence(4), make_sequence(8), make_sequence(4)
    cache.admit(keeper)
    cache.admit(leaver)
    first = leaver.block_table[0]
    cache.free(leaver)
    assert leaver.block_table == []
    cache.admit(next_one)
    assert next_one.block_table == [first]


def test_full_blocks_of_a_running_sequence_are_shared() -> None:
    cache = make_cache()
    first = compute(cache, make_sequence(10))
    second = make_sequence(11)
    assert cache.admit(second) == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert cache.num_used_blocks == 4


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    cache = make_cache()
    compute(cache, make_sequence(8))
    assert cache.admit(make_sequence(8)) == 4


def test_free_blocks_are_found_again_and_revived() -> None:
    cache = make_cache(num_blocks=3)
    first = compute(cache, make_sequence(9))
    blocks = list(first.block_table)
    cache.free(first)
    assert cache.num_used_blocks == 0
    second = make_sequence(9)
    assert cache.admit(second) == 8
    assert second.block_table[:2] == blocks[:2]
    assert cache.num_free_blocks == 0


def test_revived_blocks_count_as_taken() -> None:
    cache = make_cache(num_blocks=3)
    first = compute(cache, make_sequence(4))
    cache.free(first)
    assert cache.allocate(make_sequence(4), 4)
    sequence = make_sequence(12)
    assert cache.num_missing_blocks(sequence) == [1]
    assert cache.admit(sequence) is None
    assert cache.num_free_blocks == 2


def test_tenants_share_nothing() -> None:
    cache = make_cache()
    compute(cache, make_sequence(9, salt="a"))
    assert cache.admit(make_sequence(9, salt="b")) == 0
    assert cache.admit(make_sequence(9, salt="a")) == 8


def test_least_recently_used_goes_first_and_a_texts_end_before_its_beginning() -> None:
    cache = make_cache(num_blocks=5)
    old, young = compute(cache, make_sequence(8)), compute(cache, make_sequence(8, first_id=50))
    order = [4, *reversed(old.block_table), *reversed(young.block_table)]
    cache.free(old)
    cache.free(young)
    assert cache.groups[0].pool.free_block_ids() == order
    # A new text of three blocks takes the block without KV and the two blocks of the old text.
    cache.admit(make_sequence(12, first_id=90))
    assert cache.admit(make_sequence(8)) == 0
    assert cache.num_free_blocks == 0


def test_using_a_block_again_makes_it_young() -> None:
    cache = make_cache(num_blocks=4)
    old, young = compute(cache, make_sequence(4)), compute(cache, make_sequence(4, first_id=50))
    old_block, young_block = old.block_table[0], young.block_table[0]
    cache.free(old)
    cache.free(young)
    again = make_sequence(5)
    assert cache.admit(again) == 4
    cache.free(again)
    assert cache.groups[0].pool.free_block_ids()[-2:] == [young_block, old_block]


def test_a_failed_sequence_is_not_found() -> None:
    cache = make_cache()
    failed = make_sequence(9)
    cache.admit(failed)
    cache.publish(failed, 9)
    sharer = make_sequence(9)
    assert cache.admit(sharer) == 8
    assert cache.retract([failed]) == [failed.block_table[2:]]
    cache.free(failed)
    assert cache.admit(make_sequence(9)) == 0


def test_what_only_failed_sequences_share_is_nobody_elses() -> None:
    cache = make_cache()
    failed = make_sequence(9)
    cache.admit(failed)
    cache.publish(failed, 9)
    sharer = make_sequence(9)
    cache.admit(sharer)
    (retracted,) = cache.retract([failed, sharer])
    assert {*retracted} == {*failed.block_table, *sharer.block_table}


def test_fork_shares_full_blocks_and_copies_the_last() -> None:
    cache = make_cache()
    donor = compute(cache, make_sequence(10))
    fork = make_sequence(10)
    assert cache.fork(fork, donor) == 9
    assert fork.block_table[:2] == donor.block_table[:2]
    assert cache.take_copies() == [[(donor.block_table[2], fork.block_table[2])]]
    assert cache.take_copies() == []


def test_fork_at_a_blocks_edge_computes_only_its_last_token() -> None:
    cache = make_cache()
    donor = compute(cache, make_sequence(9))
    fork = make_sequence(9)
    assert cache.fork(fork, donor) == 8
    assert cache.take_copies() == []
    assert fork.block_table[:2] == donor.block_table[:2]


def test_fork_without_room_changes_nothing() -> None:
    cache = make_cache(num_blocks=3)
    donor = compute(cache, make_sequence(10))
    fork = make_sequence(10)
    assert cache.fork(fork, donor) is None
    assert fork.block_table == []
    assert cache.take_copies() == []


def test_hits_are_counted() -> None:
    cache = make_cache()
    compute(cache, make_sequence(9))
    cache.admit(make_sequence(10))
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (19, 8)
