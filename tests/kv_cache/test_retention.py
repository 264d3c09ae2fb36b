"""Retention priorities of blocks in the prefix cache."""

from __future__ import annotations

import math
from itertools import count

import pytest

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import KVRetention, PrefixIdentity, SamplingParams, Sequence

BLOCK = 4
FOREVER = math.inf
_ids = count(1)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_cache(clock: Clock, num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, PrefixCache(BLOCK), clock)


def run_once(
    cache: KVCacheManager, first_id: int, num_blocks: int = 2, retention: KVRetention | None = None
) -> list[int]:
    """Admit, compute and free a text of whole blocks; return its blocks."""
    sequence = Sequence(
        sequence_id=next(_ids),
        token_ids=list(range(first_id, first_id + num_blocks * BLOCK)),
        num_prompt_tokens=num_blocks * BLOCK,
        params=SamplingParams(max_tokens=1),
        arrival_s=0.0,
        retention=retention,
    )
    assert cache.admit(sequence) is not None
    cache.publish(sequence, sequence.num_tokens)
    blocks = [*sequence.block_table]
    cache.free(sequence)
    return blocks


def whole(priority: int, duration_s: float = FOREVER) -> KVRetention:
    return KVRetention(ranges=((0, 1000, priority, duration_s),))


def found(cache: KVCacheManager, first_id: int) -> int:
    """Number of the text's blocks that are still cached."""
    text = list(range(first_id, first_id + 2 * BLOCK))
    return len(cache._prefix_cache.match(text, PrefixIdentity(), len(text)))  # type: ignore[union-attr]


def test_what_shall_stay_outlives_what_came_later(clock: Clock) -> None:
    cache = make_cache(clock)
    run_once(cache, 1000, retention=whole(90))
    for number in range(10):
        run_once(cache, 2000 + 100 * number)
    assert found(cache, 1000) == 2


def test_long_durations_do_not_pile_up(clock: Clock) -> None:
    cache = make_cache(clock, num_blocks=4)
    for number in range(500):
        run_once(cache, 1000 + 100 * (number % 3), retention=whole(90, 1e6 + number))
    assert len(cache.groups[0].retention._ends) <= 2 * 4 + 64 + 2
    clock.now_s += 2e6
    run_once(cache, 9000)
    assert cache.groups[0].retention._ends == []


def test_what_nobody_needs_goes_first(clock: Clock) -> None:
    cache = make_cache(clock)
    run_once(cache, 1000)
    run_once(cache, 2000, retention=whole(0))
    run_once(cache, 3000)
    run_once(cache, 4000)
    run_once(cache, 5000)
    assert [found(cache, first) for first in (1000, 2000, 3000, 4000, 5000)] == [2, 0, 2, 2, 2]


def test_a_priority_ends_when_its_time_is_over(clock: Clock) -> None:
    cache = make_cache(clock)
    run_once(cache, 1000, retention=whole(90, 5.0))
    for number in range(5):
        run_once(cache, 2000 + 100 * number)
    assert found(cache, 1000) == 2
    clock.now_s += 5.0
    run_once(cache, 3000)
    assert found(cache, 1000) == 2
    for number in range(4):
        run_once(cache, 4000 + 100 * number)
    assert found(cache, 1000) == 0


def test_of_a_text_each_range_has_its_own(clock: Clock) -> None:
    cache = make_cache(clock, num_blocks=6)
    retention = KVRetention(ranges=((0, BLOCK, 90, FOREVER), (BLOCK, 2 * BLOCK, 1, FOREVER)))
    kept, given = run_once(cache, 1000, retention=retention)
    others = [block for number in (2000, 3000) for block in run_once(cache, number)]
    # Within a text the last block is evicted first.
    assert cache.groups[0].pool.free_block_ids() == [given, others[1], others[0], others[3], others[2], kept]


def test_a_text_that_is_known_keeps_the_block_that_is_found(clock: Clock) -> None:
    """The last token is computed again, into a separate block that lookups do not find."""
    cache = make_cache(clock)
    run_once(cache, 1000)
    run_once(cache, 1000, retention=whole(90))
    for number in range(10):
        run_once(cache, 2000 + 100 * number)
    assert found(cache, 1000) == 2


def test_those_who_ask_for_nothing_change_nothing(clock: Clock) -> None:
    cache = make_cache(clock)
    run_once(cache, 1000, retention=whole(90))
    run_once(cache, 1000)
    for number in range(10):
        run_once(cache, 2000 + 100 * number)
    assert found(cache, 1000) == 2


def test_a_block_that_gets_other_tokens_has_the_default_again(clock: Clock) -> None:
    cache = make_cache(clock, num_blocks=2)
    blocks = run_once(cache, 1000, retention=whole(90))
    assert sorted(run_once(cache, 2000)) == sorted(blocks)
    assert [cache.groups[0].retention.priority(block) for block in blocks] == [35, 35]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 4, (80, 2.0)), (4, 8, (20, FOREVER)), (8, 12, (60, 9.0)), (12, 16, (60, 9.0)), (2, 6, (80, 2.0))],
)
def test_the_greatest_of_what_is_asked_counts(
    start: int, end: int, expected: tuple[int, float] | None
) -> None:
    """With ten prompt tokens the third block contains output too."""
    retention = KVRetention(
        ranges=((0, 4, 80, 2.0), (3, 100, 20, FOREVER)), decode_priority=60, decode_duration_s=9.0
    )
    assert retention.of_tokens(start, end, 10) == expected


def test_output_is_no_prompt() -> None:
    assert whole(90).of_tokens(12, 16, 10) is None
    assert KVRetention(decode_priority=60).of_tokens(0, 8, 10) is None
