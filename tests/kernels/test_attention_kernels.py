from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret

from helpers.attention_cases import AttentionCase
from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.paged_attention import AttentionPlan, paged_attention
from naiad_kernels.store_kv import LayerCache

DTYPES = [torch.float16, torch.float32]
SINGLES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65)]
SHORTS = [(2, 2), (3, 17), (4, 130), (5, 5), (20, 50)]
LONGS = [(22, 22), (43, 100), (64, 64), (30, 31)]


def attend(interpret: Interpret, case: AttentionCase) -> torch.Tensor:
    return interpret(paged_attention, case.query, case.cache(), plan_of(case), case.scale, case.soft_cap)


def plan_of(case: AttentionCase) -> AttentionPlan:
    return AttentionPlan(len(case.query), singles=[], chunks=[], device_step=case.step())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "steps", [SINGLES, SHORTS, LONGS, SINGLES[2:4] + SHORTS[:2] + LONGS[:2]], ids=["1", "few", "many", "all"]
)
def test_any_mix_of_lengths(interpret: Interpret, steps: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = AttentionCase(steps, dtype=dtype)
    assert_close_to_reference(attend(interpret, case), case.expected())


MIXED = [(1, 33), (2, 20), (34, 40)]


@pytest.mark.parametrize(
    "heads", [(1, 1, 16), (9, 3, 64), (5, 5, 6), (7, 1, 12), (4, 2, 80), (4, 1, 96), (3, 1, 128), (2, 1, 256)]
)
def test_any_heads(interpret: Interpret, heads: tuple[int, int, int]) -> None:
    case = AttentionCase(MIXED, heads, dtype=torch.float16)
    assert_close_to_reference(attend(interpret, case), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_any_block_size(interpret: Interpret, block_size: int, dtype: torch.dtype) -> None:
    steps = [(1, block_size - 1), (1, block_size), (1, block_size + 1), (40, block_size + 41)]
    case = AttentionCase(steps, block_size=block_size, dtype=dtype)
    assert_close_to_reference(attend(interpret, case), case.expected())


@pytest.mark.parametrize("length", [255, 256, 257, 511, 513, 600])
def test_a_context_that_is_split(interpret: Interpret, length: int) -> None:
    case = AttentionCase([(1, 20), (1, length), (3, length)], heads=(2, 1, 16), block_size=64)
    assert_close_to_reference(attend(interpret, case), case.expected())


def test_tokens_on_both_sides_of_a_split(interpret: Interpret) -> None:
    case = AttentionCase([(5, 258)], heads=(2, 1, 16), block_size=64)
    assert_close_to_reference(attend(interpret, case), case.expected())


def test_batch_mates_change_no_bit(interpret: Interpret) -> None:
    heads = (2, 1, 16)
    alone = AttentionCase([(1, 300)], heads, block_size=64)
    result = attend(interpret, alone)
    many = AttentionCase([(1, 300), (1, 7), (1, 900)], heads, block_size=64)
    many.query[0] = alone.query[0]
    for source, target in ((alone.keys, many.keys), (alone.values, many.values)):
        target[many.tables[0]] = source[alone.tables[0]]
    assert torch.equal(attend(interpret, many)[0], result[0])


def test_places_of_blocks_change_no_bit(interpret: Interpret) -> None:
    cases = [AttentionCase(MIXED, seed=seed) for seed in (0, 1)]
    assert cases[0].tables != cases[1].tables
    assert torch.equal(attend(interpret, cases[0]), attend(interpret, cases[1]))


def test_one_token_equals_the_last_row_of_many(interpret: Interpret) -> None:
    many = AttentionCase([(40, 70)], heads=(9, 3, 16))
    expected = attend(interpret, many)[-1:]
    for num_tokens in (1, 4):
        part = AttentionCase([(40, 70)], heads=(9, 3, 16))
        part.query_lens, part.query = [num_tokens], many.query[-num_tokens:]
        assert_close_to_reference(attend(interpret, part)[-1:], expected)


def test_chunks_of_a_prompt_equal_the_whole(interpret: Interpret) -> None:
    whole = AttentionCase([(70, 70)], heads=(3, 1, 16))
    parts = []
    for begin, end in ((0, 1), (1, 33), (33, 64), (64, 70)):
        chunk = AttentionCase([(70, 70)], heads=(3, 1, 16))
        chunk.query_lens, chunk.seq_lens, chunk.query = [end - begin], [end], whole.query[begin:end]
        parts.append(attend(interpret, chunk))
    assert_close_to_reference(torch.cat(parts), attend(interpret, whole))


def test_sequences_without_tokens_are_skipped(interpret: Interpret) -> None:
    """A captured launch is as large as its bucket; missing sequences have length 0."""
    case = AttentionCase([(1, 20), (1, 0), (3, 300), (0, 0), (30, 40), (0, 0), (44, 44), (0, 0)])
    case.query_lens[1] = 0
    case.query = case.query[1:]
    assert_close_to_reference(attend(interpret, case), case.expected())


@pytest.mark.parametrize("steps", [[(1, 20), (1, 60), (1, 9)], [(5, 20), (7, 60)], [(40, 40), (50, 60)]])
def test_a_nan_stays_in_its_own_sequence(interpret: Interpret, steps: list[tuple[int, int]]) -> None:
    case = AttentionCase(steps)
    expected = case.expected()
    case.keys[case.tables[1][0]] = torch.nan
    actual = attend(interpret, case)
    start, end = steps[0][0], steps[0][0] + steps[1][0]
    assert actual[start:end].isnan().all()
    actual[start:end] = expected[start:end]
    assert_close_to_reference(actual, expected)


def test_a_block_beyond_32_bits_is_reached(interpret: Interpret) -> None:
    """Offsets into the cache are 64-bit: a block after 2**31 elements is read correctly."""
    for steps in ([(1, 16)], [(40, 48)]):
        case = AttentionCase(steps, heads=(4, 2, 16))
        expected = case.expected()
        # Memory that nobody touches is not there: only the blocks in use take any.
        blocks_before = 2**31 // case.keys[0].numel() + 1
        assert_close_to_reference(interpret(_attend_far_away, case, blocks_before), expected)


def _attend_far_away(case: AttentionCase, blocks_before: int) -> torch.Tensor:
    torch.use_deterministic_algorithms(False)
    caches = []
    for cache in (case.keys, case.values):
        far = torch.empty((blocks_before + len(cache), *cache.shape[1:]), dtype=cache.dtype)
        far[blocks_before:] = cache
        caches.append(far)
    case.tables = [[block + blocks_before for block in table] for table in case.tables]
    result = paged_attention(case.query, LayerCache(*caches), plan_of(case))
    torch.use_deterministic_algorithms(True)
    return result


EVERY_LENGTH = [(1, 5), (1, 300), (3, 17), (4, 290), (22, 40), (43, 300)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 20, 64, 257])
def test_a_window(interpret: Interpret, window: int, dtype: torch.dtype) -> None:
    """Blocks before the window hold NaN and are not in the table."""
    case = AttentionCase(EVERY_LENGTH, dtype=dtype, window=window)
    expected = case.expected()
    case.forget_what_no_token_sees()
    assert_close_to_reference(attend(interpret, case), expected)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_window_over_blocks_of_any_size(interpret: Interpret, block_size: int) -> None:
    case = AttentionCase([(1, 300), (4, 310), (40, 280)], block_size=block_size, window=70)
    expected = case.expected()
    case.forget_what_no_token_sees()
    assert_close_to_reference(attend(interpret, case), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20])
def test_scores_are_scaled_and_capped(interpret: Interpret, window: int, dtype: torch.dtype) -> None:
    case = AttentionCase(EVERY_LENGTH, dtype=dtype, window=window, scale=0.7, soft_cap=3.0)
    assert_close_to_reference(attend(interpret, case), case.expected())


def test_a_window_over_a_quantized_cache(interpret: Interpret) -> None:
    case = AttentionCase(EVERY_LENGTH, cache_dtype=torch.int8, window=20, soft_cap=5.0)
    expected = case.expected()
    case.forget_what_no_token_sees()
    assert_close_to_reference(attend(interpret, case), expected)
