from __future__ import annotations

import random

import pytest
import torch
from attention_cases import random_tree
from kernel_tolerances import assert_close_to_unquantized

from naiad_kernels.paged_attention import attention_sort_key, paged_attention, plan_attention, reference
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.store_kv import LayerCache
from naiad_kernels.store_kv.quantize import quantize

BLOCK = 16


class Case:
    """A step over a cache in which every block that no sequence owns holds NaN."""

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
        self.trees: list[list[int] | None] | None = None

    def cache(self) -> LayerCache:
        if self.cache_dtype is None:
            return LayerCache(self.keys, self.values)
        (key, key_scale), (value, value_scale) = (
            quantize(part, self.cache_dtype) for part in (self.keys, self.values)
        )
        return LayerCache(key, value, key_scale, value_scale)

    def actual(self) -> torch.Tensor:
        plan = plan_attention(self.query_lens, self.seq_lens, self.tables, self.layout, self.trees)
        return paged_attention(self.query, self.cache(), plan)

    def expected(self) -> torch.Tensor:
        return reference.paged_attention(
            self.query, self.cache(), self.query_lens, self.seq_lens, self.tables, self.trees
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


def test_tokens_of_a_tree_see_their_ancestors() -> None:
    case = Case([(1, 20), (4, 4), (7, 60), (16, 40), (5, 33), (40, 64)], num_blocks=60)
    case.trees = [random_tree(length) if length in (4, 7, 16) else None for length in case.query_lens]
    torch.testing.assert_close(case.actual(), case.expected(), atol=2e-6, rtol=1e-5)


def test_a_branch_of_a_tree_is_a_sequence_of_its_own() -> None:
    """Behind one root lie two branches: the second gives what it gives in the place of the first."""
    case = Case([(5, 30)])
    case.trees = [[0b1, 0b11, 0b111, 0b1001, 0b11001]]
    together = case.actual()[[0, 3, 4]]
    block = case.tables[0][1]
    for cache in (case.keys, case.values):
        cache[block, :, 26 - BLOCK : 28 - BLOCK] = cache[block, :, 28 - BLOCK : 30 - BLOCK].clone()
    case.query, case.query_lens, case.seq_lens, case.trees = case.query[[0, 3, 4]], [3], [28], None
    torch.testing.assert_close(together, case.actual(), atol=2e-6, rtol=1e-5)


def test_a_chain_is_a_tree() -> None:
    case = Case([(5, 30), (3, 3)])
    expected = case.actual()
    case.trees = [[(2 << row) - 1 for row in range(length)] for length in case.query_lens]
    assert torch.equal(case.actual(), expected)
