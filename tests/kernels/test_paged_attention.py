from __future__ import annotations

import random

import pytest
import torch

from helpers.attention_cases import AttentionCase
from helpers.kernel_tolerances import assert_close_to_unquantized
from naiad_kernels.paged_attention import attention_sort_key, paged_attention, plan_attention, reference
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.store_kv import LayerCache
from naiad_kernels.store_kv.quantize import quantize

BLOCK = 16


class Case:
    """A step over a cache in which every block without an owner holds NaN."""

    def __init__(
        self,
        steps: list[tuple[int, int]],
        num_blocks: int = 40,
        heads: tuple[int, int, int] = (6, 2, 10),
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        steps = sorted(steps, key=lambda step: attention_sort_key(*step))
        self.query_lens = [query for query, _ in steps]
        self.seq_lens = [context for _, context in steps]
        num_heads, num_kv_heads, head_dim = heads
        self.layout = CacheLayout(num_heads, num_kv_heads, head_dim, BLOCK, dtype, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        free = list(range(num_blocks))
        random.Random(0).shuffle(free)
        self.tables = [[free.pop() for _ in range(self.layout.blocks_for(n))] for n in self.seq_lens]
        shape = (num_blocks, num_kv_heads, BLOCK, head_dim)
        self.keys = torch.full(shape, torch.nan, dtype=dtype)
        self.values = torch.full(shape, torch.nan, dtype=dtype)
        for block in {block for table in self.tables for block in table}:
            self.keys[block] = torch.randn(shape[1:], generator=generator).to(dtype)
            self.values[block] = torch.randn(shape[1:], generator=generator).to(dtype)
        self.query = torch.randn(sum(self.query_lens), num_heads, head_dim, generator=generator).to(dtype)

        self.cache_dtype = cache_dtype

    def cache(self) -> LayerCache:
        if self.cache_dtype is None:
            return LayerCache(self.keys, self.values)
        (key, key_scale), (value, value_scale) = (
            quantize(part, self.cache_dtype) for part in (self.keys, self.values)
        )
        return LayerCache(key, value, key_scale, value_scale)

    def actual(self) -> torch.Tensor:
        plan = plan_attention(self.query_lens, self.seq_lens, self.tables, self.layout)
        return paged_attention(self.query, self.cache(), plan)

    def expected(self) -> torch.Tensor:
        return reference.paged_attention(
            self.query, self.cache(), self.query_lens, self.seq_lens, self.tables
        )


SINGLE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 33), (1, 64)]
CHUNKS = [(2, 2), (3, 17), (16, 16), (17, 17), (5, 33), (40, 64)]


@pytest.mark.parametrize("num_blocks", [14, 40, 400], ids=["all used", "dense", "sparse"])
@pytest.mark.parametrize("steps", [SINGLE[:1], SINGLE, CHUNKS[:1], CHUNKS, SINGLE + CHUNKS[:2]])
def test_attention_equals_the_reference(steps: list[tuple[int, int]], num_blocks: int) -> None:
    case = Case(steps, max(num_blocks, 40 if len(steps) > 1 else 1))
    torch.testing.assert_close(case.actual(), case.expected(), atol=2e-6, rtol=1e-5)


def test_blocks_side_by_side_are_read_in_place() -> None:
    case = Case(SINGLE, num_blocks=14)
    plan = plan_attention(case.query_lens, case.seq_lens, case.tables, case.layout)
    assert isinstance(plan.singles[0].blocks, slice)
    torch.testing.assert_close(case.actual(), case.expected(), atol=2e-6, rtol=1e-5)


def test_scattered_blocks_are_copied() -> None:
    case = Case(SINGLE, num_blocks=400)
    plan = plan_attention(case.query_lens, case.seq_lens, case.tables, case.layout)
    assert isinstance(plan.singles[0].blocks, torch.Tensor)


def test_a_block_can_belong_to_two_sequences() -> None:
    case = Case([(1, 20), (1, 30)], num_blocks=4)
    case.tables[1][0] = case.tables[0][0]
    torch.testing.assert_close(case.actual(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1, 8), (9, 3, 64), (5, 5, 6), (7, 1, 12)])
def test_any_grouping_of_heads(heads: tuple[int, int, int]) -> None:
    case = Case([(1, 17), (1, 40), (9, 20), (3, 3)], heads=heads)
    torch.testing.assert_close(case.actual(), case.expected(), atol=2e-6, rtol=1e-5)


def test_contexts_of_very_different_length() -> None:
    case = Case([(1, 3), (1, 1500), (1, 600), (4, 1200), (2, 9)], num_blocks=250)
    torch.testing.assert_close(case.actual(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_the_reference(dtype: torch.dtype) -> None:
    case = Case([(1, 17), (1, 40), (9, 20)], dtype=dtype)
    torch.testing.assert_close(case.actual(), case.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("steps", [[(1, 20), (1, 60), (1, 9)], [(5, 20), (7, 60), (3, 9)]])
def test_a_nan_stays_in_its_own_sequence(steps: list[tuple[int, int]]) -> None:
    case = Case(steps, num_blocks=8)
    poisoned = 1
    expected = case.expected()
    case.keys[case.tables[poisoned]] = torch.nan
    case.values[case.tables[poisoned]] = torch.nan
    actual = case.actual()
    start = sum(case.query_lens[:poisoned])
    end = start + case.query_lens[poisoned]
    assert actual[start:end].isnan().all()
    others = torch.cat((actual[:start], actual[end:]))
    torch.testing.assert_close(others, torch.cat((expected[:start], expected[end:])), atol=2e-6, rtol=1e-5)


CACHE_DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("num_blocks", [14, 400], ids=["dense", "sparse"])
def test_a_quantized_cache(num_blocks: int, cache_dtype: torch.dtype) -> None:
    for steps in (SINGLE, CHUNKS[:3]):
        case = Case(steps, num_blocks, cache_dtype=cache_dtype)
        torch.testing.assert_close(case.actual(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_quantizing_changes_attention_little(cache_dtype: torch.dtype) -> None:
    exact, quantized = (
        Case([(1, 40), (5, 33)], heads=(6, 2, 64), cache_dtype=dtype) for dtype in (None, cache_dtype)
    )
    assert_close_to_unquantized(quantized.actual(), exact.expected(), cache_dtype)


WINDOWED = [(1, 1), (1, 15), (1, 40), (1, 64), (2, 2), (3, 17), (17, 40), (5, 64), (40, 64)]


def attend(case: AttentionCase) -> torch.Tensor:
    plan = plan_attention(case.query_lens, case.seq_lens, case.tables, case.layout)
    return paged_attention(case.query, case.cache(), plan, case.scale, case.soft_cap)


def finite_rests(case: AttentionCase) -> AttentionCase:
    """The unwritten rest of a last block is finite on a CPU."""
    for table in case.tables:
        for cache in (case.keys, case.values):
            cache[table[-1]] = cache[table[-1]].nan_to_num(0.0)
    return case


@pytest.mark.parametrize("window", [1, 7, 16, 17, 33, 64, 1000])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    case = finite_rests(AttentionCase(WINDOWED, window=window))
    torch.testing.assert_close(attend(case), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 16, 20])
def test_blocks_before_the_window_are_not_read(window: int) -> None:
    case = finite_rests(AttentionCase(WINDOWED, window=window))
    expected = case.expected()
    case.forget_what_no_token_sees()
    torch.testing.assert_close(attend(case), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_scaled_and_capped(window: int, dtype: torch.dtype) -> None:
    case = finite_rests(AttentionCase(WINDOWED, dtype=dtype, window=window, scale=0.7, soft_cap=3.0))
    atol = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend(case), case.expected(), atol=atol, rtol=1e4 * atol)


def test_a_cap_changes_what_is_attended_to() -> None:
    free, capped = (finite_rests(AttentionCase(WINDOWED, soft_cap=cap)) for cap in (0.0, 1.0))
    assert (free.expected() - capped.expected()).abs().max() > 0.1


def test_contexts_beyond_the_window_cost_no_more_than_the_window() -> None:
    """Texts of very different lengths form one group as wide as the window."""
    case = AttentionCase([(1, 100), (1, 700), (1, 3000)], window=32)
    plan = plan_attention(case.query_lens, case.seq_lens, case.tables, case.layout)
    (group,) = plan.singles
    assert group.mask.shape == (3, 1, 3 * BLOCK)
