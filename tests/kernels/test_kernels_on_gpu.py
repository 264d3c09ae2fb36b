from __future__ import annotations

import pytest
import torch
from gpu_cases import CODES, DTYPES, GPU, captured, to_gpu
from lora_cases import LoraCase

from helpers.kernel_tolerances import assert_close_to_reference
from naiad_kernels.gelu_and_mul import Approximate, gelu_and_mul
from naiad_kernels.gelu_and_mul import reference as gelu_reference
from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.gumbel_argmax import reference as gumbel_reference
from naiad_kernels.kept_threshold import RowFilters, kept_threshold
from naiad_kernels.kept_threshold import reference as threshold_reference
from naiad_kernels.lora import lora_expand, lora_shrink, plan_lora
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.rms_norm import reference as rms_norm_reference
from naiad_kernels.rotary import reference as rotary_reference
from naiad_kernels.rotary import rotary, rotary_angles
from naiad_kernels.rotary_store_kv import HeadNorm, rotary_store_kv
from naiad_kernels.silu_and_mul import reference as silu_reference
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.staging import Staging
from naiad_kernels.store_kv import LayerCache, Slots, store_kv
from naiad_kernels.store_kv.quantize import dequantize

pytestmark = pytest.mark.gpu

NUM_TOKENS = [1, 7, 300]


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


def quantized_cache(num_kv_heads: int, head_dim: int, codes: torch.dtype) -> LayerCache:
    rows = (4, num_kv_heads, 16)
    parts = (torch.zeros(*rows, head_dim).to(codes), torch.zeros(*rows, head_dim).to(codes))
    return LayerCache(*parts, torch.zeros(rows), torch.zeros(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
def test_store_kv_quantizes(codes: torch.dtype, dtype: torch.dtype) -> None:
    """Scales and codes are bitwise equal to the reference's, including rounding to float8."""
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


def empty_cache(codes: torch.dtype | None, dtype: torch.dtype) -> LayerCache:
    if codes is not None:
        return quantized_cache(3, 64, codes)
    return LayerCache(*(torch.zeros(4, 3, 16, 64, dtype=dtype) for _ in range(2)))


def store_on(
    device: torch.device,
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor | None,
    cache: LayerCache,
    slots: Slots,
) -> torch.Tensor:
    return rotary_store_kv(
        heads.to(device),
        (angles[0].to(device), angles[1].to(device)),
        None if norm_weight is None else HeadNorm(norm_weight.to(device), 1e-6),
        cache,
        Slots(slots.blocks.to(device), slots.offsets.to(device)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotary_store_kv(has_norm: bool, codes: torch.dtype | None, dtype: torch.dtype) -> None:
    heads = torch.randn(33, 15, 64).to(dtype)
    angles = rotary_angles(torch.arange(33) + 100, torch.rand(32), dtype)
    norm_weight = torch.randn(12, 64).to(dtype) if has_norm else None
    slots = Slots.from_slot_mapping(torch.randperm(64)[:33], 16)
    expected, actual = empty_cache(codes, dtype), to_gpu(empty_cache(codes, dtype))
    inputs = (heads, angles, norm_weight)
    expected_query = store_on(torch.device("cpu"), *inputs, expected, slots)
    query = store_on(GPU, *inputs, actual, slots)
    assert_close_to_reference(query.cpu(), expected_query)
    for part, scale, expected_part, expected_scale in (
        (actual.key, actual.key_scale, expected.key, expected.key_scale),
        (actual.value, actual.value_scale, expected.value, expected.value_scale),
    ):
        if scale is None or expected_scale is None:
            assert_close_to_reference(part.cpu(), expected_part)
            continue
        assert_close_to_reference(scale.cpu().to(dtype), expected_scale.to(dtype))
        # A key that is rounded differently before it is quantized may have another code.
        differ = part.cpu().float() != expected_part.float()
        assert differ.float().mean() <= 0.02
        stored, wanted = (
            dequantize(part.cpu(), scale.cpu(), dtype),
            dequantize(expected_part, expected_scale, dtype),
        )
        torch.testing.assert_close(stored, wanted, rtol=0.13, atol=2 * float(expected_scale.max()))


@pytest.mark.parametrize("codes", [None, *CODES])
def test_a_captured_store_serves_other_slots(codes: torch.dtype | None) -> None:
    heads = torch.randn(3, 15, 64).bfloat16().to(GPU)
    angles = rotary_angles(torch.arange(3, device=GPU), torch.rand(32, device=GPU), torch.bfloat16)
    cache, expected = (to_gpu(empty_cache(codes, torch.bfloat16)) for _ in range(2))
    slot_mapping = torch.full((3,), -1, device=GPU)

    def store(into: LayerCache) -> torch.Tensor:
        return rotary_store_kv(heads, angles, None, into, Slots.from_slot_mapping(slot_mapping, 16))

    graph, _ = captured(lambda: store(cache))
    assert not cache.value.float().any()
    for slots in ([63, -1, 5], [0, 17, 40]):
        slot_mapping.copy_(torch.tensor(slots))
        graph.replay()
        store(expected)
        assert torch.equal(cache.key.float(), expected.key.float())
        assert torch.equal(cache.value.float(), expected.value.float())
    assert cache.value[3, :, 15].float().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads(dtype: torch.dtype) -> None:
    heads, weight = torch.randn(33, 15, 80).to(dtype)[:, :12], torch.randn(12, 80).to(dtype)
    actual = rms_norm(heads.to(GPU), weight.to(GPU), 1e-6)
    assert_close_to_reference(actual.cpu(), rms_norm_reference.rms_norm(heads, weight, 1e-6))


def test_staged_lists_arrive_one_step_after_the_other() -> None:
    """The host writes the next step while the device may still read the last one."""
    target = torch.zeros(Staging.bytes_for([1000], []), dtype=torch.uint8, device=GPU)
    seen = []
    for step in range(50):
        staging = Staging(len(target), GPU, target)
        numbers = staging.put([step] * 1000, torch.int64)
        staging.send()
        seen.append(numbers.sum())
    assert [int(each) for each in seen] == [1000 * step for step in range(50)]


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
