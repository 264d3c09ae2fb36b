from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from attention_cases import AttentionCase, random_tree
from kernel_tolerances import assert_close_to_reference
from lora_cases import LoraCase
from rejection_cases import ragged_case

from naiad_kernels.gelu_and_mul import Approximate, gelu_and_mul
from naiad_kernels.gelu_and_mul import reference as gelu_reference
from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.gumbel_argmax import reference as gumbel_reference
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.kept_threshold import reference as threshold_reference
from naiad_kernels.lora import lora_expand, lora_shrink, plan_lora
from naiad_kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from naiad_kernels.rejection_sampling import Drafts, TargetRows, rejection_sampling
from naiad_kernels.rejection_sampling import reference as rejection_reference
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.rms_norm import reference as rms_norm_reference
from naiad_kernels.rotary import reference as rotary_reference
from naiad_kernels.rotary import rotary, rotary_angles
from naiad_kernels.rotary_store_kv import HeadNorm, rotary_store_kv
from naiad_kernels.silu_and_mul import reference as silu_reference
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache, Slots, store_kv
from naiad_kernels.top_log_probs import reference as log_probs_reference
from naiad_kernels.top_log_probs import top_log_probs

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
FLOAT8_MARK = pytest.mark.skipif(not HAS_FLOAT8, reason="float8_e4m3fn needs sm_90")
CODES = [torch.int8, pytest.param(torch.float8_e4m3fn, marks=FLOAT8_MARK)]
NUM_TOKENS = [1, 7, 300]
STEPS = [(1, 1), (1, 17), (1, 3000), (1, 64), (4, 700), (9, 9), (100, 100), (300, 2000)]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rms_norm(num_tokens: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(*s).to(dtype) for s in ((num_tokens, 4096), (num_tokens, 4096), (4096,))
    )
    assert_close_to_reference(
        rms_norm(x.to(GPU), weight.to(GPU), 1e-5).cpu(), rms_norm_reference.rms_norm(x, weight, 1e-5)
    )
    normed, total = add_rms_norm(x.to(GPU), residual.to(GPU), weight.to(GPU), 1e-5)
    expected = rms_norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total.cpu(), expected[1])
    assert_close_to_reference(normed.cpu(), expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_silu_and_mul(num_tokens: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_tokens, 2 * 1536).to(dtype)
    assert_close_to_reference(silu_and_mul(gate_up.to(GPU)).cpu(), silu_reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul(approximate: Approximate, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(33, 2 * 1536) * 4).to(dtype)
    expected = gelu_reference.gelu_and_mul(gate_up, approximate)
    assert_close_to_reference(gelu_and_mul(gate_up.to(GPU), approximate).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotary(head_dim: int, dtype: torch.dtype) -> None:
    heads = torch.randn(33, 15, head_dim).to(dtype)[:, :12]
    angles = rotary_angles(torch.arange(33) + 100, torch.rand(head_dim // 2), dtype)
    actual = rotary(heads.to(GPU), *(part.to(GPU) for part in angles))
    assert_close_to_reference(actual.cpu(), rotary_reference.rotary(heads, *angles))


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_skips_padding(dtype: torch.dtype) -> None:
    key, value = (torch.randn(3, 3, 64).to(dtype).to(GPU) for _ in range(2))
    caches = [torch.zeros(4, 3, 16, 64, dtype=dtype, device=GPU) for _ in range(2)]
    store_kv(
        key, value, LayerCache(*caches), Slots.from_slot_mapping(torch.tensor([63, -1, 5], device=GPU), 16)
    )
    for cache, source in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[3, :, 15], source[0])
        assert torch.equal(cache[0, :, 5], source[2])
        assert cache.count_nonzero() == source[[0, 2]].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_store_kv(dtype: torch.dtype) -> None:
    heads = torch.randn(33, 15, 64).to(dtype)
    angles = rotary_angles(torch.arange(33) + 100, torch.rand(32), dtype)
    norm = HeadNorm(torch.randn(12, 64).to(dtype), 1e-6)
    slot_mapping = torch.randperm(64)[:33]
    results = []
    for device in (torch.device("cpu"), GPU):
        caches = [torch.zeros(4, 3, 16, 64, dtype=dtype, device=device) for _ in range(2)]
        on_device = [part.to(device) for part in (heads, *angles, norm.weight, slot_mapping)]
        query = rotary_store_kv(
            on_device[0],
            (on_device[1], on_device[2]),
            HeadNorm(on_device[3], norm.eps),
            LayerCache(*caches),
            Slots.from_slot_mapping(on_device[4], 16),
        )
        results.append([query.cpu(), *(cache.cpu() for cache in caches)])
    for expected, actual in zip(*results, strict=True):
        assert_close_to_reference(actual, expected)


def quantized_cache(num_kv_heads: int, head_dim: int, codes: torch.dtype) -> LayerCache:
    rows = (4, num_kv_heads, 16)
    parts = (torch.zeros(*rows, head_dim).to(codes), torch.zeros(*rows, head_dim).to(codes))
    return LayerCache(*parts, torch.zeros(rows), torch.zeros(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
def test_store_kv_quantizes(codes: torch.dtype, dtype: torch.dtype) -> None:
    """Scales and codes are the reference's to the last bit, the rounding to float8 included."""
    key, value = (torch.randn(33, 3, 128).to(dtype) for _ in range(2))
    slot_mapping = torch.randperm(64)[:33]
    expected, actual = quantized_cache(3, 128, codes), to_gpu(quantized_cache(3, 128, codes))
    store_kv(key, value, expected, Slots.from_slot_mapping(slot_mapping, 16))
    store_kv(key.to(GPU), value.to(GPU), actual, Slots.from_slot_mapping(slot_mapping.to(GPU), 16))
    for scale, expected_scale in (
        (actual.key_scale, expected.key_scale),
        (actual.value_scale, expected.value_scale),
    ):
        assert scale is not None
        assert expected_scale is not None
        assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(actual.key.cpu().float(), expected.key.float())
    assert torch.equal(actual.value.cpu().float(), expected.value.float())


def test_drawing_from_filtered_rows() -> None:
    logits = torch.randn(6, 128_256) * 3
    best = logits.amax(1)
    temperature = torch.tensor([0.3, 0.7, 1.0, 1.0, 1.5, 2.0], dtype=torch.float64)
    top_k = torch.tensor([0, 50, 0, 1, 1000, 0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.5, 0.05], dtype=torch.float64)
    log_min_p = torch.tensor([0, 0, 0, 0, 0, 0.01], dtype=torch.float64).log()
    filters = (temperature, top_k, top_p, log_min_p)
    expected = threshold_reference.kept_threshold(logits, best, *filters)
    on_gpu = RowFilters(*(part.to(GPU) for part in filters))
    threshold = kept_threshold(logits.to(GPU), best.to(GPU), on_gpu)
    assert torch.equal(threshold.cpu(), expected)
    keys = torch.randint(-(2**62), 2**62, (6,))
    drawn = gumbel_argmax(logits.to(GPU), best.to(GPU), on_gpu.temperature, threshold, keys.to(GPU))
    assert torch.equal(drawn.cpu(), gumbel_reference.gumbel_argmax(logits, best, temperature, expected, keys))


@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize("vocab_size", [9, 128_256])
def test_rejection_sampling(vocab_size: int, has_probs: bool) -> None:
    target, drafts, starts, max_drafts = ragged_case([0, 16, 3, -1, 5], vocab_size, has_probs)
    rows = TargetRows(*(getattr(target, field.name).to(GPU) for field in fields(target)))
    probs = None if drafts.probs is None else drafts.probs.to(GPU)
    on_gpu = Drafts(drafts.token_ids.to(GPU), probs)
    actual = rejection_sampling(rows, on_gpu, starts.to(GPU), max_drafts)
    expected = rejection_reference.rejection_sampling(target, drafts, starts, max_drafts)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("num_top", [0, 5, 64])
def test_top_log_probs(num_top: int) -> None:
    logits, chosen = torch.randn(7, 128_256) * 3, torch.randint(128_256, (7,))
    logits[:, ::3] = 8.5
    actual = [part.cpu() for part in top_log_probs(logits.to(GPU), chosen.to(GPU), num_top)]
    expected = log_probs_reference.top_log_probs(logits, chosen, num_top)
    assert torch.equal(actual[1], expected[1])
    assert_close_to_reference(actual[0], expected[0])
    assert_close_to_reference(actual[2], expected[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_lora(num_tokens: int, dtype: torch.dtype) -> None:
    ids = (torch.arange(num_tokens) % 7 - 1).tolist()
    case = LoraCase(ids, 4096, (4096, 1024, 1024), [8, 64, 16, 128, 32, 8], dtype)
    plan = plan_lora(case.plan.adapter_ids.to(GPU), 6)
    out = case.out.to(GPU)
    shrunk = lora_shrink(case.x.to(GPU), case.down.to(GPU), plan)
    lora_expand(out, shrunk, case.up.to(GPU), case.slice_sizes, plan)
    assert_close_to_reference(out.cpu(), case.expected())


def to_gpu(cache: LayerCache) -> LayerCache:
    parts = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    return LayerCache(*(None if part is None else part.to(GPU) for part in parts))


def attend_on_gpu(case: AttentionCase) -> torch.Tensor:
    layout = replace(case.layout, device=GPU)
    plan = plan_attention(case.query_lens, case.seq_lens, case.tables, layout, case.trees)
    return paged_attention(case.query.to(GPU), to_gpu(case.cache()), plan).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80), (8, 2, 128), (4, 2, 256)])
def test_paged_attention(heads: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    case = AttentionCase(STEPS, heads, block_size, dtype)
    assert_close_to_reference(attend_on_gpu(case), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80), (8, 2, 128), (4, 2, 256)])
def test_paged_attention_of_a_quantized_cache(
    heads: tuple[int, int, int], codes: torch.dtype, dtype: torch.dtype
) -> None:
    case = AttentionCase(STEPS, heads, 64, dtype, cache_dtype=codes)
    assert_close_to_reference(attend_on_gpu(case), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 128)])
def test_paged_attention_of_trees(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = AttentionCase([(1, 17), (4, 700), (16, 16), (16, 900), (100, 100)], heads, 64, dtype)
    case.trees = [random_tree(length) if 1 < length <= 16 else None for length in case.query_lens]
    assert_close_to_reference(attend_on_gpu(case), case.expected())


def test_a_captured_launch_serves_other_lengths() -> None:
    largest = AttentionCase([(1, 2000)] * 3, (8, 2, 128), 64, torch.float16)
    step = plan_attention(
        largest.query_lens, largest.seq_lens, largest.tables, replace(largest.layout, device=GPU)
    ).device_step
    assert step is not None
    query, cache = largest.query.to(GPU), to_gpu(largest.cache())
    plan = AttentionPlan(3, [], [], step)
    paged_attention(query, cache, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(query, cache, plan)
    for seq_lens in ([2000, 2000, 2000], [1, 65, 1999]):
        step.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        largest.seq_lens = seq_lens
        assert_close_to_reference(out.cpu(), largest.expected())
