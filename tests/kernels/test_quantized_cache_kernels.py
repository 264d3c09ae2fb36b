from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret

from helpers.attention_cases import AttentionCase
from helpers.kernel_tolerances import assert_close_to_reference, assert_codes_close
from naiad_kernels.paged_attention import AttentionPlan, paged_attention
from naiad_kernels.rotary import rotary_angles
from naiad_kernels.rotary_store_kv import kernel as fused_kernel
from naiad_kernels.rotary_store_kv import reference as fused_reference
from naiad_kernels.store_kv import LayerCache, Slots
from naiad_kernels.store_kv import kernel as store_kv_kernel
from naiad_kernels.store_kv import reference as store_kv_reference
from naiad_kernels.store_kv.quantize import LARGEST_CODE

DTYPES = [torch.float16, torch.float32]
CODES = [torch.int8, torch.float8_e4m3fn]
BLOCK = 16
SLOTS = Slots.from_slot_mapping(torch.tensor([3 * BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 5, 0]), BLOCK)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attend(interpret: Interpret, case: AttentionCase) -> torch.Tensor:
    plan = AttentionPlan(len(case.query), singles=[], chunks=[], device_step=case.step())
    return interpret(paged_attention, case.query, case.cache(), plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("heads", "block_size"), [((6, 2, 16), 16), ((9, 3, 64), 32), ((2, 1, 80), 64)])
def test_attention(
    interpret: Interpret, heads: tuple[int, int, int], block_size: int, codes: torch.dtype, dtype: torch.dtype
) -> None:
    steps = [(1, 1), (1, 17), (1, 65), (4, 40), (30, 31)]
    case = AttentionCase(steps, heads, block_size, dtype, cache_dtype=codes)
    assert_close_to_reference(attend(interpret, case), case.expected())


@pytest.mark.parametrize("codes", CODES)
def test_attention_of_a_split_context(interpret: Interpret, codes: torch.dtype) -> None:
    case = AttentionCase([(1, 513), (3, 257)], (2, 1, 16), 64, torch.float16, cache_dtype=codes)
    assert_close_to_reference(attend(interpret, case), case.expected())


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_values_of_any_size_keep_their_precision(interpret: Interpret, size: float) -> None:
    """Probabilities times small scales must not underflow in float16."""
    case = AttentionCase([(1, 600)], (2, 1, 16), 64, torch.float16, cache_dtype=torch.int8)
    case.values *= size
    assert_close_to_reference(attend(interpret, case), case.expected())


def test_a_nan_stays_in_its_own_sequence(interpret: Interpret) -> None:
    case = AttentionCase([(1, 20), (1, 60), (5, 9)], cache_dtype=torch.int8)
    expected = case.expected()
    case.values[case.tables[1][0], 0, 3, 5] = torch.nan
    actual = attend(interpret, case)
    first_head = actual[1].view(2, -1)[0]
    assert first_head.isnan().all()
    first_head.copy_(expected[1].view(2, -1)[0])
    assert_close_to_reference(actual, expected)


class Caches:
    """An empty cache for the kernel and one for the reference, both filled with `unwritten`."""

    def __init__(self, heads: int, head_dim: int, codes: torch.dtype) -> None:
        rows = (4, heads, BLOCK)
        self.actual, self.expected = (
            LayerCache(
                *(torch.zeros(*rows, head_dim).to(codes) for _ in range(2)),
                *(torch.full(rows, torch.nan) for _ in range(2)),
            )
            for _ in range(2)
        )

    def assert_close(self, max_share: float = 0.0) -> None:
        actual, expected = self.actual, self.expected
        assert_codes_close((actual.key, actual.key_scale), (expected.key, expected.key_scale), max_share)
        assert_codes_close((actual.value, actual.value_scale), (expected.value, expected.value_scale), 0.0)


def exact_codes(shape: tuple[int, ...], codes: torch.dtype) -> torch.Tensor:
    """Vectors whose codes need no rounding: the interpreter's rounding to float8 is wrong."""
    x = torch.randn(shape).mul(100).clamp(-127, 127).to(codes).float()
    x[..., 0] = LARGEST_CODE[codes]
    return x * torch.randint(-8, 3, shape[:-1]).float().exp2().unsqueeze(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 2), (3, 10), (2, 80), (12, 128)])
def test_int8_codes_are_the_references(
    interpret: Interpret, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    heads = torch.randn(4, 3 * num_kv_heads, head_dim).to(dtype)
    key, value = heads[:, num_kv_heads : 2 * num_kv_heads], heads[:, 2 * num_kv_heads :]
    caches = Caches(num_kv_heads, head_dim, torch.int8)
    interpret(store_kv_kernel.store_kv, key, value, caches.actual, SLOTS)
    store_kv_reference.store_kv(key, value, caches.expected, SLOTS)
    caches.assert_close()


@pytest.mark.parametrize("codes", CODES)
def test_vectors_of_codes_are_stored_exactly(interpret: Interpret, codes: torch.dtype) -> None:
    key, value = (exact_codes((4, 3, 10), codes) for _ in range(2))
    caches = Caches(3, 10, codes)
    interpret(store_kv_kernel.store_kv, key, value, caches.actual, SLOTS)
    stored = caches.actual.key.float() * caches.actual.key_scale[..., None]
    assert torch.equal(stored[SLOTS.blocks, :, SLOTS.offsets], key)
    store_kv_reference.store_kv(key, value, caches.expected, SLOTS)
    caches.assert_close()


@pytest.mark.parametrize("codes", CODES)
def test_vectors_without_a_magnitude(interpret: Interpret, codes: torch.dtype) -> None:
    """Zeros stay zeros, and vectors that are not finite have the scale NaN."""
    key = torch.zeros(4, 2, 8)
    key[1, 0, 3], key[1, 1, 3] = torch.nan, torch.inf
    caches = Caches(2, 8, codes)
    interpret(store_kv_kernel.store_kv, key, key, caches.actual, SLOTS)
    scales = caches.actual.key_scale[SLOTS.blocks, :, SLOTS.offsets]
    assert scales[1].isnan().all()
    assert scales[[0, 2, 3]].isfinite().all()
    stored = caches.actual.key[SLOTS.blocks, :, SLOTS.offsets][[0, 2, 3]].float()
    assert not stored.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", [(1, 1, 2), (9, 3, 64), (2, 1, 80), (25, 5, 128)])
def test_rotary_store_kv_in_int8(
    interpret: Interpret, heads: tuple[int, int, int], has_norm: bool, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    projected = torch.randn(4, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = rotary_angles(torch.arange(4) + 50, torch.rand(head_dim // 2), dtype)
    weight = torch.randn(num_heads + num_kv_heads, head_dim).to(dtype) if has_norm else None
    caches = Caches(num_kv_heads, head_dim, torch.int8)
    steps = (projected, angles, (weight, 1e-5))
    query = interpret(fused_kernel.rotary_store_kv, *steps, caches.actual, SLOTS)
    expected = fused_reference.rotary_store_kv(*steps, caches.expected, SLOTS)
    assert_close_to_reference(query, expected)
    # Some keys are rounded differently before they are quantized.
    caches.assert_close(max_share=0.02)


def test_rotary_store_kv_in_float8(interpret: Interpret) -> None:
    projected = exact_codes((4, 10, 16), torch.float8_e4m3fn)
    angles = rotary_angles(torch.zeros(4, dtype=torch.int64), torch.rand(8), torch.float32)
    caches = Caches(3, 16, torch.float8_e4m3fn)
    interpret(fused_kernel.rotary_store_kv, projected, angles, (None, 0.0), caches.actual, SLOTS)
    fused_reference.rotary_store_kv(projected, angles, (None, 0.0), caches.expected, SLOTS)
    caches.assert_close()


def test_padding_is_not_stored(interpret: Interpret) -> None:
    slots = Slots.from_slot_mapping(torch.tensor([-1, 20, -1, -1]), BLOCK)
    projected = torch.randn(4, 5, 8)
    angles = rotary_angles(torch.zeros(4, dtype=torch.int64), torch.rand(4), torch.float32)
    stores = (
        (store_kv_kernel.store_kv, projected[:, 3:4], projected[:, 4:]),
        (fused_kernel.rotary_store_kv, projected[:, 2:], angles, (None, 0.0)),
    )
    for function, *inputs in stores:
        # Block −1 would be in the memory before the cache.
        codes = [torch.zeros(5, 1, BLOCK, 8, dtype=torch.int8) for _ in range(2)]
        scales = [torch.full((5, 1, BLOCK), torch.nan) for _ in range(2)]
        interpret(function, *inputs, LayerCache(*(part[1:] for part in (*codes, *scales))), slots)
        for part, scale in zip(codes, scales, strict=True):
            assert scale.isfinite().nonzero().tolist() == [[2, 0, 4]]
            assert part[2, 0, 4].any()
            part[2, 0, 4] = 0
            assert not part.any()
