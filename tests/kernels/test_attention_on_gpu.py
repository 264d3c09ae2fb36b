from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gpu_cases import CODES, DTYPES, GPU, captured, needs_float8, plan_on_gpu, to_gpu

from helpers.attention_cases import AttentionCase
from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.paged_attention import AttentionPlan, paged_attention, reference
from naiad_kernels.paged_attention.device_step import DeviceStep, padded_run, plan_padded_step
from naiad_kernels.staging import Staging
from naiad_kernels.store_kv import LayerCache, Slots, store_kv

pytestmark = pytest.mark.gpu

STEPS = [(1, 1), (1, 17), (1, 3000), (1, 64), (4, 700), (9, 9), (100, 100), (300, 2000)]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 2, 128), (4, 2, 256)]
SPLIT = 256


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attend_on_gpu(case: AttentionCase, fixed_split: int = 0) -> torch.Tensor:
    plan = plan_on_gpu(case, fixed_split)
    return paged_attention(case.query.to(GPU), to_gpu(case.cache()), plan, case.scale, case.soft_cap).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_a_step(heads: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    case = AttentionCase(STEPS, heads, block_size, dtype)
    expected = case.expected()
    for fixed_split in (0, SPLIT):
        assert_close_to_reference(attend_on_gpu(case, fixed_split), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 20, 600])
@pytest.mark.parametrize("heads", HEADS)
def test_windows_scales_and_caps(heads: tuple[int, int, int], window: int, dtype: torch.dtype) -> None:
    case = AttentionCase(STEPS, heads, 64, dtype, window=window, scale=0.2, soft_cap=5.0)
    expected = case.expected()
    case.forget_what_no_token_sees()
    for fixed_split in (0, SPLIT):
        assert_close_to_reference(attend_on_gpu(case, fixed_split), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("heads", HEADS)
def test_a_quantized_cache(heads: tuple[int, int, int], codes: torch.dtype, dtype: torch.dtype) -> None:
    case = AttentionCase(STEPS, heads, 64, dtype, cache_dtype=codes)
    assert_close_to_reference(attend_on_gpu(case), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_a_tokens_attention_in_a_fixed_order_is_the_same_in_any_chunk(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    whole = AttentionCase([(900, 900)], heads, 64, dtype)
    query, cache = whole.query.to(GPU), to_gpu(whole.cache())
    parts = []
    for begin, end in pairwise([0, 900, 0, 1, 40, 700, 899, 900]):
        if begin < end:
            whole.query_lens, whole.seq_lens = [end - begin], [end]
            parts.append(paged_attention(query[begin:end], cache, plan_on_gpu(whole, SPLIT)))
    assert torch.equal(torch.cat(parts[1:]), parts[0])


@pytest.mark.parametrize("fixed_split", [0, SPLIT])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "codes"),
    [
        *((dtype, None) for dtype in DTYPES),
        (torch.bfloat16, torch.int8),
        pytest.param(torch.bfloat16, torch.float8_e4m3fn, marks=needs_float8),
    ],
)
def test_a_captured_launch_serves_other_lengths(
    dtype: torch.dtype, codes: torch.dtype | None, query_len: int, fixed_split: int
) -> None:
    largest = AttentionCase([(query_len, 2000)] * 3, (8, 2, 128), 64, dtype, cache_dtype=codes)
    layout = replace(largest.layout, device=GPU, fixed_split=fixed_split)
    run = padded_run(layout, 3, query_len, 2000)
    memory = torch.zeros(Staging.bytes_for([], [3 * layout.blocks_for(2000), 3, 4]), dtype=torch.uint8)
    memory = memory.to(GPU)

    def put(query_lens: list[int], seq_lens: list[int]) -> DeviceStep:
        staging = Staging(len(memory), GPU, memory)
        tables = largest.tables[: len(seq_lens)]
        step = plan_padded_step(query_lens, seq_lens, tables, layout, run, staging)
        staging.send()
        return step

    query, cache = largest.query.to(GPU), to_gpu(largest.cache())
    plan = AttentionPlan(len(query), [], [], put(largest.query_lens, largest.seq_lens))
    graph, out = captured(lambda: paged_attention(query, cache, plan))
    full = [query_len] * 3
    for query_lens, seq_lens in ((full, [2000] * 3), ([1, query_len, 1], [1, 65, 1999]), ([1], [300])):
        put(query_lens, seq_lens)
        graph.replay()
        num_tokens = sum(query_lens)
        tables = largest.tables[: len(seq_lens)]
        expected = reference.paged_attention(
            largest.query[:num_tokens], largest.cache(), query_lens, seq_lens, tables
        )
        assert_close_to_reference(out[:num_tokens].cpu(), expected)


def test_blocks_behind_more_elements_than_an_int_counts() -> None:
    """8.6 GB of cache."""
    small = AttentionCase([(1, 200), (4, 200), (100, 200)], (16, 8, 128), 64, torch.bfloat16)
    expected = small.expected()
    num_blocks, first = len(small.keys), 2**31 // small.keys[0].numel() + 1
    cache = LayerCache(
        *(torch.empty(first + num_blocks, 8, 64, 128, dtype=torch.bfloat16, device=GPU) for _ in range(2))
    )
    rows = [part.to(GPU).transpose(1, 2).flatten(0, 1) for part in (small.keys, small.values)]
    slots = torch.arange(len(rows[0]), device=GPU) + first * 64
    store_kv(rows[0], rows[1], cache, Slots.from_slot_mapping(slots, 64))
    small.tables = [[first + block for block in table] for table in small.tables]
    for fixed_split in (0, SPLIT):
        actual = paged_attention(small.query.to(GPU), cache, plan_on_gpu(small, fixed_split))
        assert_close_to_reference(actual.cpu(), expected)
