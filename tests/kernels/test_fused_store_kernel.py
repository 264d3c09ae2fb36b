from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret

from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.rotary import rotary_angles
from naiad_kernels.rotary_store_kv import HeadNorm, kernel, reference, rotary_store_kv
from naiad_kernels.store_kv import LayerCache, Slots

BLOCK = 16
SLOTS = [3 * BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 5, 0]


class Case:
    def __init__(
        self, heads: tuple[int, int, int], dtype: torch.dtype, has_norm: bool, slots: list[int]
    ) -> None:
        torch.manual_seed(0)
        num_heads, num_kv_heads, head_dim = heads
        num_all, num_tokens = num_heads + 2 * num_kv_heads, len(slots)
        self.heads = torch.randn(num_tokens, num_all, head_dim).to(dtype)
        self.angles = rotary_angles(torch.arange(num_tokens) + 50, torch.rand(head_dim // 2), dtype)
        weight = torch.randn(num_all - num_kv_heads, head_dim).to(dtype)
        self.norm = (weight, 1e-5) if has_norm else (None, 0.0)
        self.slots = Slots.from_slot_mapping(torch.tensor(slots, dtype=torch.int64), BLOCK)
        self.cache_shape = (4, num_kv_heads, BLOCK, head_dim)

    def caches(self) -> list[torch.Tensor]:
        """Views of larger tensors, so that block −1 is in the memory before them."""
        num_blocks, *rest = self.cache_shape
        whole = (torch.full((num_blocks + 1, *rest), torch.nan, dtype=self.heads.dtype) for _ in range(2))
        return [cache[1:] for cache in whole]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", [(1, 1, 2), (9, 3, 64), (5, 5, 6), (2, 1, 80), (25, 5, 128)])
def test_equals_the_three_ops(
    interpret: Interpret, heads: tuple[int, int, int], has_norm: bool, dtype: torch.dtype
) -> None:
    case = Case(heads, dtype, has_norm, SLOTS)
    actual, expected = case.caches(), case.caches()
    query = interpret(
        kernel.rotary_store_kv, case.heads, case.angles, case.norm, LayerCache(*actual), case.slots
    )
    expected_query = reference.rotary_store_kv(
        case.heads, case.angles, case.norm, LayerCache(*expected), case.slots
    )
    assert_close_to_reference(query, expected_query)
    for cache, expected_cache in zip(actual, expected, strict=True):
        assert torch.equal(cache.isnan(), expected_cache.isnan())
        assert_close_to_reference(cache.nan_to_num(), expected_cache.nan_to_num())
    assert torch.equal(actual[1].nan_to_num(), expected[1].nan_to_num())


def test_head_norms_with_weights_of_more_bits(interpret: Interpret) -> None:
    case = Case((9, 3, 64), torch.float16, True, SLOTS)
    weight, eps = case.norm
    norm = (weight.float() + 1e-4 * torch.randn(weight.shape), eps)
    actual, expected = case.caches(), case.caches()
    query = interpret(kernel.rotary_store_kv, case.heads, case.angles, norm, LayerCache(*actual), case.slots)
    expected_query = reference.rotary_store_kv(
        case.heads, case.angles, norm, LayerCache(*expected), case.slots
    )
    assert_close_to_reference(query, expected_query)
    assert (query != expected_query).float().mean() < 0.01
    assert_close_to_reference(actual[0].nan_to_num(), expected[0].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_public_op_on_a_cpu(dtype: torch.dtype) -> None:
    case = Case((3, 1, 8), dtype, True, SLOTS)
    actual, expected = case.caches(), case.caches()
    query = rotary_store_kv(case.heads, case.angles, HeadNorm(*case.norm), LayerCache(*actual), case.slots)
    expected_query = reference.rotary_store_kv(
        case.heads, case.angles, case.norm, LayerCache(*expected), case.slots
    )
    assert_close_to_reference(query, expected_query)
    for cache, expected_cache in zip(actual, expected, strict=True):
        assert torch.equal(cache.isnan(), expected_cache.isnan())
        assert_close_to_reference(cache.nan_to_num(), expected_cache.nan_to_num())


def test_padding_is_not_stored(interpret: Interpret) -> None:
    case = Case((3, 1, 8), torch.float32, False, [-1, 20, -1])
    caches = case.caches()
    guarded = [cache.as_strided((5, *cache.shape[1:]), cache.stride(), 0) for cache in caches]
    interpret(kernel.rotary_store_kv, case.heads, case.angles, case.norm, LayerCache(*caches), case.slots)
    assert torch.equal(caches[1][1, :, 4], case.heads[1, 4:])
    assert all(cache.isfinite().sum() == 8 for cache in guarded)


def test_no_tokens(interpret: Interpret) -> None:
    case = Case((3, 1, 8), torch.float32, True, [])
    query = interpret(
        kernel.rotary_store_kv, case.heads, case.angles, case.norm, LayerCache(*case.caches()), case.slots
    )
    assert query.shape == (0, 3, 8)
