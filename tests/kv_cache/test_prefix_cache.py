from __future__ import annotations

from naiad.kv_cache.prefix_cache import BlockName, CachedBlock, PrefixCache, sha256
from naiad.sequence import PrefixIdentity

BLOCK_SIZE = 2
NO_SALT = PrefixIdentity()


def insert_all(cache: PrefixCache, token_ids: list[int], first_block_id: int, salt: str = "") -> None:
    parent: CachedBlock | None = None
    for index in range(len(token_ids) // BLOCK_SIZE):
        parent = cache.insert(
            parent, PrefixIdentity(salt), token_ids, index * BLOCK_SIZE, [first_block_id + index]
        )


def block_ids(blocks: list[CachedBlock]) -> list[int]:
    return [block.block_ids[0] for block in blocks]


def match(cache: PrefixCache, token_ids: list[int], salt: str = "") -> list[int]:
    return block_ids(cache.match(token_ids, PrefixIdentity(salt), len(token_ids)))


def same_for_all(parent_digest: bytes, token_bytes: bytes) -> bytes:
    return b"same"


def by_tokens_alone(parent_digest: bytes, token_bytes: bytes) -> bytes:
    return token_bytes


def test_longest_known_beginning() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    insert_all(cache, [1, 2, 3, 4, 5, 6], 10)
    assert match(cache, [1, 2, 3, 4, 9, 9]) == [10, 11]
    assert match(cache, [1, 2, 3]) == [10]
    assert match(cache, [9, 2, 3, 4]) == []


def test_at_most_so_many_tokens() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    insert_all(cache, [1, 2, 3, 4], 10)
    assert block_ids(cache.match([1, 2, 3, 4], NO_SALT, 3)) == [10]


def test_same_tokens_elsewhere_in_a_text_are_another_block() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    insert_all(cache, [1, 2, 3, 4], 10)
    assert match(cache, [3, 4]) == []


def test_a_salt_is_part_of_the_name() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    insert_all(cache, [1, 2], 10, salt="a")
    assert match(cache, [1, 2]) == []
    assert match(cache, [1, 2], salt="a") == [10]


def test_a_collision_of_all_digests_is_a_miss() -> None:
    cache = PrefixCache(BLOCK_SIZE, same_for_all)
    insert_all(cache, [1, 2], 10)
    assert match(cache, [3, 4]) == []
    assert match(cache, [1, 2], salt="a") == []
    assert match(cache, [1, 2, 1, 2]) == [10]


def test_a_collision_of_equal_tokens_after_different_ones_is_a_miss() -> None:
    cache = PrefixCache(BLOCK_SIZE, by_tokens_alone)
    insert_all(cache, [1, 2, 7, 7], 10)
    insert_all(cache, [3, 4], 20)
    assert match(cache, [3, 4, 7, 7]) == [20]
    assert match(cache, [1, 2, 7, 7]) == [10, 11]


def test_of_two_that_collide_the_newest_is_known() -> None:
    cache = PrefixCache(BLOCK_SIZE, same_for_all)
    insert_all(cache, [1, 2], 10)
    insert_all(cache, [3, 4], 20)
    assert match(cache, [1, 2]) == []
    assert match(cache, [3, 4]) == [20]
    assert not cache.holds(10)
    assert len(cache) == 1


def test_the_first_of_two_equal_blocks_stays() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    insert_all(cache, [1, 2, 3, 4], 10)
    insert_all(cache, [1, 2, 5, 6], 20)
    assert match(cache, [1, 2, 5, 6]) == [10, 21]
    assert not cache.holds(20)


def test_what_was_evicted_is_unknown_with_all_that_follows_it() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    insert_all(cache, [1, 2, 3, 4], 10)
    cache.evict(10)
    assert match(cache, [1, 2, 3, 4]) == []
    # Computed again: the block after it is another one now.
    insert_all(cache, [1, 2, 3, 4], 20)
    assert match(cache, [1, 2, 3, 4]) == [20, 21]
    assert not cache.holds(11)


def test_evicting_the_unknown_does_nothing() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    cache.evict(3)
    assert len(cache) == 0


def test_a_text_that_is_asked_about_again_is_named_once() -> None:
    named: list[bytes] = []

    def counting(parent_digest: bytes, token_bytes: bytes) -> bytes:
        named.append(token_bytes)
        return sha256(parent_digest, token_bytes)

    cache = PrefixCache(2, counting)
    cache.insert(None, NO_SALT, [1, 2, 3, 4], 0, [10])
    names: list[BlockName] = []
    named.clear()
    for _ in range(3):
        assert block_ids(cache.match([1, 2, 3, 4], NO_SALT, 4, names)) == [10]
    assert len(named) == 2
    cache.insert(cache.match([1, 2, 3, 4], NO_SALT, 4)[0], NO_SALT, [1, 2, 3, 4], 2, [11])
    assert block_ids(cache.match([1, 2, 3, 4], NO_SALT, 4, names)) == [10, 11]
