"""The KV groups of a model, and how many blocks each gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from helpers.tiny_models import make_tiny_model
from naiad.config import AttentionSpec, EngineConfig, ModelConfig
from naiad.errors import ConfigError
from naiad.model_runner import ModelRunner
from naiad.model_runner.kv_pool import KVPool, kv_group_specs
from naiad_kernels.native.kv_layout import native_keys, native_values

# Two KV heads of eight numbers in blocks of 16 tokens, float32.
LAYER_BLOCK_BYTES = 2 * 2 * 8 * 16 * 4


def model_config(*windows: int) -> ModelConfig:
    return ModelConfig(
        architecture="Any",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(windows),
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=1600,
        tie_word_embeddings=True,
        attention=tuple(AttentionSpec(scale=1.0, window=window) for window in windows),
        eos_token_ids=(),
        dtype="float32",
    )


def specs(
    num_layer_blocks: int, *model_configs: ModelConfig, max_num_seqs: int = 4
) -> list[tuple[int, int | None]]:
    """Sizes and windows of the groups if this many blocks of one layer fit and steps have 32 tokens."""
    config = EngineConfig(model_dir="", block_size=16, max_num_seqs=max_num_seqs)
    num_bytes = num_layer_blocks * LAYER_BLOCK_BYTES
    groups = kv_group_specs(config, model_configs, torch.float32, num_bytes, max_step_tokens=32)
    return [(group.num_blocks, group.window) for group in groups]


def test_one_group_gets_all_that_it_can_use() -> None:
    assert specs(100, model_config(0, 0)) == [(50, None)]
    assert specs(5000, model_config(0, 0)) == [(400, None)]


def test_a_window_gets_what_its_bound_needs_and_the_rest_goes_to_full_attention() -> None:
    """A window of 40 and a step need six blocks, plus one spare, for each of four sequences."""
    assert specs(300, model_config(40, 0, 40)) == [(244, None), (28, 40)]


def test_where_memory_is_short_all_groups_have_the_same_number() -> None:
    assert specs(30, model_config(40, 0, 40)) == [(10, None), (10, 40)]


def test_no_group_gets_more_than_is_useful() -> None:
    assert specs(10_000, model_config(40, 0, 40)) == [(400, None), (28, 40)]


def test_a_draft_models_layers_lie_in_the_first_group() -> None:
    assert specs(60, model_config(40, 0), model_config(0, 40, 0, 40)) == [(10, None), (10, 40)]


def test_a_draft_model_sees_all_even_if_the_target_does_not() -> None:
    assert specs(30, model_config(40, 40), model_config(0)) == [(10, None)]


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"at least one block of {3 * LAYER_BLOCK_BYTES} bytes"):
        specs(2, model_config(40, 0, 40))


def test_copies_and_clears_are_those_of_their_group() -> None:
    pool = KVPool(model_config(40, 0, 40), [3, 4], 16, torch.float32, torch.device("cpu"))
    assert [len(layer.key) for layer in pool.layers] == [4, 3, 4]
    for layer in pool.layers:
        layer.key[1] = layer.value[1] = 7
    pool.copy([[(1, 2)], [(1, 0)]])
    assert [layer.key[:, 0, 0, 0].tolist() for layer in pool.layers] == [
        [7, 7, 0, 0],
        [0, 7, 7],
        [7, 7, 0, 0],
    ]
    pool.zero([[1], []])
    pool.zero_slots([[], [1 * 16]])
    assert [layer.value[1, 0, :2, 0].tolist() for layer in pool.layers] == [[0, 7], [0, 0], [0, 7]]


def test_codes_take_a_byte_and_a_scale_for_each_vector() -> None:
    config = EngineConfig(model_dir="", block_size=16)
    bfloat16, codes = (
        kv_group_specs(
            config,
            [replace(model_config(0), head_dim=64)],
            torch.bfloat16,
            1 << 20,
            max_step_tokens=32,
            codes=kind,
        )[0].num_blocks
        for kind in (None, torch.int8)
    )
    assert codes == (1 << 20) // (2 * 2 * 16 * (64 + 4))
    assert codes >= 1.85 * bfloat16


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_their_scales_are_copied_and_cleared_together(is_native: bool, dtype: torch.dtype) -> None:
    pool = KVPool(model_config(0), [3], 16, dtype, torch.device("cpu"), is_native, torch.int8)
    (layer,) = pool.layers
    assert layer.key_scale is not None
    assert layer.value_scale is not None
    layer.key[1] = layer.value[1] = 7
    layer.key_scale[1] = layer.value_scale[1] = torch.nan
    pool.copy([[(1, 2)]])
    assert layer.key[2].eq(7).all()
    assert layer.value_scale[2].isnan().all()
    pool.zero_slots([[2 * 16 + 5]])
    for part, scale in ((layer.key, layer.key_scale), (layer.value, layer.value_scale)):
        view = native_keys if part is layer.key else native_values
        codes = view(part, dtype)[2] if is_native else part[2]
        assert codes.eq(0).sum() == 2 * 8
        assert scale[2, :, 5].eq(0).all()
        assert scale[2].isnan().sum() == 2 * 15
    pool.zero([[1]])
    assert layer.key_scale[1].eq(0).all()
    assert layer.value[1].eq(0).all()


def test_memory_of_blocks_that_nobody_has_written_is_not_taken() -> None:
    def held_bytes() -> int:
        return psutil.Process().memory_info().rss

    config, num_blocks = model_config(0, 0), 1 << 16
    before = held_bytes()
    pool = KVPool(config, [num_blocks], 16, torch.float32, torch.device("cpu"))
    size = sum(layer.key.nbytes + layer.value.nbytes for layer in pool.layers)
    assert size == 2 * num_blocks * LAYER_BLOCK_BYTES
    assert held_bytes() - before < size / 8
    assert not pool.layers[1].value[-1].any()
    pool.layers[0].key.fill_(1)
    assert held_bytes() - before > size / 8


def test_a_pool_larger_than_memory_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, max_position_embeddings=1 << 40)
    config = EngineConfig(model_dir=str(tmp_path), kv_cache_bytes=1 << 50, max_num_seqs=4096)
    with pytest.raises(ConfigError, match=r"^kv_cache_bytes = \d+: expected a size that fits in memory"):
        ModelRunner(config)
