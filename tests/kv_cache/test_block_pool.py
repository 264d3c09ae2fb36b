from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.kv_cache.block_pool import BlockPool


def test_low_ids_first() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]


def test_what_was_freed_last_is_taken_first() -> None:
    pool = BlockPool(5)
    for _ in range(4):
        pool.allocate()
    pool.release(3)
    pool.release(1)
    assert [pool.allocate() for _ in range(3)] == [1, 3, 4]


def test_an_empty_pool_is_in_order_again() -> None:
    pool = BlockPool(3)
    for _ in range(3):
        pool.allocate()
    for block_id in (0, 2, 1):
        pool.release(block_id)
    assert pool.free_block_ids() == [0, 1, 2]


def test_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.retain(block_id)
    pool.release(block_id)
    assert pool.num_free == 1
    pool.release(block_id)
    assert pool.num_free == 2


def test_free_block_can_be_taken_from_the_middle() -> None:
    pool = BlockPool(4)
    pool.retain(2)
    assert pool.free_block_ids() == [0, 1, 3]
    assert pool.ref_count(2) == 1


@pytest.mark.asserts
def test_releasing_a_free_block_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="free already"):
        BlockPool(2).release(1)


@pytest.mark.asserts
def test_allocating_from_a_full_pool_is_our_bug() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()


def test_kept_blocks_are_taken_last_and_the_oldest_of_them_first() -> None:
    pool = BlockPool(4)
    for _ in range(4):
        pool.allocate()
    pool.release(2, rank=0)
    pool.release(0, rank=0)
    pool.release(3)
    assert [pool.allocate() for _ in range(3)] == [3, 2, 0]


def test_an_empty_pool_keeps_the_order_of_kept_blocks() -> None:
    pool = BlockPool(4)
    for _ in range(4):
        pool.allocate()
    pool.release(2, rank=0)
    pool.release(3)
    pool.release(0, rank=0)
    pool.release(1)
    assert pool.free_block_ids() == [1, 3, 2, 0]


def test_kept_blocks_are_taken_by_rank() -> None:
    pool = BlockPool(5)
    for _ in range(5):
        pool.allocate()
    for block_id, rank in ((0, 50), (1, 7), (2, 50), (3, 7)):
        pool.release(block_id, rank)
    pool.rerank(0, 7)
    pool.release(4)
    assert pool.free_block_ids() == [4, 1, 3, 0, 2]
    assert [pool.allocate() for _ in range(5)] == [4, 1, 3, 0, 2]


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from("arkRs"), st.integers(0, 8), st.sampled_from((0, 35, 100)))),
)
def test_free_list_and_counts_agree_after_any_operations(
    num_blocks: int, steps: list[tuple[str, int, int]]
) -> None:
    """Compared with a plain list of (rank, time of freeing); the order of blocks not kept is not compared."""
    pool = BlockPool(num_blocks)
    counts = [0] * num_blocks
    kept: dict[int, tuple[int, int]] = {}
    for now, (step, number, rank) in enumerate(steps):
        block_id = number % num_blocks
        if step == "a" and pool.num_free:
            has_unkept = len(kept) < pool.num_free
            taken = pool.allocate()
            assert taken not in kept if has_unkept else taken == min(kept, key=kept.__getitem__)
            counts[taken] += 1
            kept.pop(taken, None)
        elif step in "rk" and counts[block_id]:
            pool.release(block_id, rank if step == "k" else None)
            counts[block_id] -= 1
            if step == "k" and not counts[block_id]:
                kept[block_id] = rank, now
        elif step == "R":
            pool.retain(block_id)
            counts[block_id] += 1
            kept.pop(block_id, None)
        elif step == "s" and block_id in kept:
            pool.rerank(block_id, rank)
            kept[block_id] = rank, now
        assert [pool.ref_count(index) for index in range(num_blocks)] == counts
        free = [index for index, count in enumerate(counts) if count == 0]
        order = pool.free_block_ids()
        assert sorted(order) == free
        assert pool.num_free == len(free)
        assert order[len(free) - len(kept) :] == sorted(kept, key=kept.__getitem__)
