"""KV groups whose layers see only a window."""

from __future__ import annotations

import math
from itertools import count

import pytest

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.prefix_cache import NO_BLOCK, PrefixCache, sha256
from naiad.sequence import KVRetention, PrefixIdentity, SamplingParams, Sequence

BLOCK = 4
STEP = 8
_ids = count(1)


def make_cache(
    *num_blocks: int, windows: tuple[int | None, ...] = (None, 6), is_cached: bool = True
) -> KVCacheManager:
    specs = [KVGroupSpec(*spec) for spec in zip(num_blocks, windows, strict=True)]
    prefix_cache = PrefixCache(BLOCK, sha256, windows) if is_cached else None
    return KVCacheManager(specs, BLOCK, prefix_cache, max_step_tokens=STEP)


def make_sequence(num_tokens: int, first_id: int = 0, retention: KVRetention | None = None) -> Sequence:
    token_ids = list(range(first_id, first_id + num_tokens))
    params = SamplingParams(max_tokens=1)
    return Sequence(next(_ids), token_ids, num_tokens, params, 0.0, retention=retention)


def advance(cache: KVCacheManager, sequence: Sequence, num_tokens: int) -> None:
    """Compute tokens in steps of the maximum length."""
    while sequence.num_computed_tokens < num_tokens:
        end = min(num_tokens, sequence.num_computed_tokens + STEP)
        assert cache.allocate(sequence, sequence.num_tokens)
        assert all(len(table) * BLOCK >= end for table in sequence.block_tables)
        cache.publish(sequence, end)
        sequence.num_computed_tokens = sequence.next_start = end
        cache.leave_window(sequence)


def computed(cache: KVCacheManager, sequence: Sequence) -> Sequence:
    num_cached_tokens = cache.admit(sequence)
    assert num_cached_tokens is not None
    sequence.num_computed_tokens = sequence.next_start = num_cached_tokens
    advance(cache, sequence, sequence.num_tokens)
    return sequence


def held(sequence: Sequence, group: int = 1) -> list[int]:
    return [block_id for block_id in sequence.block_tables[group] if block_id != NO_BLOCK]


def found(cache: KVCacheManager, num_tokens: int) -> int:
    """Number of tokens that a text would take from the prefix cache."""
    assert cache._prefix_cache is not None
    return BLOCK * len(cache._prefix_cache.match(range(num_tokens), PrefixIdentity(), num_tokens - 1))


@pytest.mark.parametrize("window", [1, 3, 4, 6, 13])
@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 40])
def test_a_window_holds_few_blocks_and_all_that_it_sees(window: int, num_prompt_tokens: int) -> None:
    """Checked before every step, for a prompt computed in chunks and for its output."""
    cache = make_cache(64, 64, windows=(None, window), is_cached=False)
    most = math.ceil((window + STEP) / BLOCK) + 1
    sequence = make_sequence(num_prompt_tokens)
    assert cache.admit(sequence) == 0
    for _ in range(60):
        end = min(sequence.num_tokens, sequence.num_computed_tokens + STEP)
        assert cache.allocate(sequence, sequence.num_tokens)
        table = sequence.block_tables[1]
        first_seen = max(0, sequence.num_computed_tokens - window + 1)
        assert NO_BLOCK not in table[first_seen // BLOCK : -(-end // BLOCK)]
        assert len(table) * BLOCK >= end
        assert len(held(sequence)) <= most
        assert len(sequence.block_table) == math.ceil(sequence.num_tokens / BLOCK)
        sequence.num_computed_tokens = sequence.next_start = end
        cache.leave_window(sequence)
        if end == sequence.num_tokens:
            sequence.token_ids.append(7)
    assert cache.groups[1].pool.num_blocks - cache.groups[1].pool.num_free == len(held(sequence)) <= most


def test_no_room_in_one_group_changes_nothing_in_any() -> None:
    cache = make_cache(8, 3)
    computed(cache, make_sequence(4))
    second = make_sequence(12, first_id=50)
    assert cache.num_missing_blocks(second) == [-4, 1]
    assert cache.admit(second) is None
    assert not any(second.block_tables)
    assert [group.pool.num_free for group in cache.groups] == [7, 2]
    third = make_sequence(8, first_id=80)
    assert cache.admit(third) == 0
    tables = [[*table] for table in third.block_tables]
    assert not cache.allocate(third, 9)
    assert third.block_tables == tables


def test_drafts_get_what_every_group_has() -> None:
    cache = make_cache(8, 2)
    sequence = computed(cache, make_sequence(4))
    assert cache.extend(sequence, 11) == 8
    assert [len(table) for table in sequence.block_tables] == [2, 2]
    cache.trim(sequence)
    assert [len(table) for table in sequence.block_tables] == [1, 1]


def test_a_hit_needs_only_the_last_window() -> None:
    cache = make_cache(16, 16)
    first = computed(cache, make_sequence(33))
    second = make_sequence(33)
    assert cache.admit(second) == 32
    # Tokens 26 to 31 are in the last two blocks.
    assert second.block_tables[1][:8] == [NO_BLOCK] * 6 + first.block_tables[1][6:8]
    assert second.block_table[:8] == first.block_table[:8]


def test_what_a_window_has_left_behind_can_still_be_found() -> None:
    cache = make_cache(16, 16)
    first = computed(cache, make_sequence(40))
    assert first.block_tables[1][:8] == [NO_BLOCK] * 8
    assert cache.admit(make_sequence(13)) == 12


def test_the_longest_prefix_that_all_groups_have_wins() -> None:
    """In the windowed group, the blocks that left the window first are evicted first."""
    cache = make_cache(32, 5)
    first = computed(cache, make_sequence(20))
    early = [block_id for block_id in range(5) if block_id not in held(first)]
    assert cache.groups[1].pool.free_block_ids() == early
    cache.free(first)
    # Takes two blocks of the windowed group: the first two of the text.
    other = computed(cache, make_sequence(8, first_id=100))
    cache.free(other)
    # Blocks 2 to 4 are cached: enough for windows that end after block 3 or 4, and for no others.
    assert [found(cache, num_tokens) for num_tokens in (21, 17, 13, 9)] == [20, 16, 0, 0]
    assert cache.admit(make_sequence(17)) == 16


def test_a_lost_block_of_full_attention_ends_every_prefix() -> None:
    cache = make_cache(5, 16)
    first = computed(cache, make_sequence(16))
    cache.free(first)
    # Takes the last blocks of the first text, which are evicted first.
    cache.free(computed(cache, make_sequence(12, first_id=50)))
    assert cache.admit(make_sequence(17)) == 8


def test_only_windows_keep_a_text_whose_beginning_is_gone() -> None:
    cache = make_cache(5, windows=(6,))
    first = computed(cache, make_sequence(20))
    cache.free(first)
    cache.free(computed(cache, make_sequence(4, first_id=100)))
    again = make_sequence(21)
    assert cache.admit(again) == 20
    cache.free(again)
    for first_id in (200, 300):
        cache.free(computed(cache, make_sequence(20, first_id)))
    assert cache.admit(make_sequence(21)) == 0
    prefix_cache = cache._prefix_cache
    assert prefix_cache is not None
    assert len(prefix_cache) <= 10


def test_a_fork_shares_the_window_and_copies_the_last_block_of_every_group() -> None:
    cache = make_cache(16, 16)
    donor = computed(cache, make_sequence(18))
    fork = make_sequence(18)
    assert cache.fork(fork, donor) == 17
    assert fork.block_tables[1][:4] == [NO_BLOCK] * 3 + donor.block_tables[1][3:4]
    pairs = zip(donor.block_tables, fork.block_tables, strict=True)
    assert cache.take_copies() == [[(source[4], target[4])] for source, target in pairs]
    assert cache.take_copies() == []


def test_a_fork_from_a_donor_that_has_gone_on_is_admitted_like_any_other() -> None:
    cache = make_cache(16, 16)
    donor = computed(cache, make_sequence(10))
    donor.token_ids += range(200, 230)
    advance(cache, donor, 40)
    sibling = make_sequence(10)
    assert cache.fork(sibling, donor) == 8
    assert not cache.has_copies


def test_a_fork_without_room_in_one_group_changes_nothing() -> None:
    cache = make_cache(16, 5)
    donor = computed(cache, make_sequence(18))
    taker = make_sequence(12, first_id=70)
    assert cache.admit(taker) == 0
    free = [group.pool.num_free for group in cache.groups]
    fork = make_sequence(18)
    assert cache.fork(fork, donor) is None
    assert not any(fork.block_tables)
    assert [group.pool.num_free for group in cache.groups] == free


def test_nothing_of_a_failed_sequence_is_found_even_before_its_window() -> None:
    cache = make_cache(16, windows=(6,))
    failed = computed(cache, make_sequence(30))
    own = held(failed, 0)
    assert cache.retract([failed]) == [own]
    cache.free(failed)
    for num_tokens in (9, 17, 30):
        assert cache.num_missing_blocks(make_sequence(num_tokens))[0] < 0
        assert cache.admit(make_sequence(num_tokens)) == 0


def test_retention_holds_for_blocks_that_a_window_leaves_behind() -> None:
    cache = make_cache(64, 10)
    whole = KVRetention(ranges=((0, 8, 90, math.inf),))
    cache.free(computed(cache, make_sequence(24, retention=whole)))
    for number in range(1, 10):
        cache.free(computed(cache, make_sequence(24, first_id=100 * number)))
    assert cache.admit(make_sequence(9)) == 8


def test_identities_share_nothing() -> None:
    cache = make_cache(16, 16)
    computed(cache, make_sequence(9))
    other = make_sequence(9)
    other.prefix_identity = PrefixIdentity("other")
    assert cache.admit(other) == 0


@pytest.mark.parametrize(
    ("num_blocks", "windows", "expected"),
    [((9, 5), (None, 6), 36), ((9, 4), (None, 6), 16), ((5,), (6,), None), ((4,), (6,), 16)],
)
def test_how_long_a_sequence_alone_can_become(
    num_blocks: tuple[int, ...], windows: tuple[int | None, ...], expected: int | None
) -> None:
    """A window and a step need five blocks."""
    assert make_cache(*num_blocks, windows=windows).max_sequence_tokens == expected
