from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from naiad.config import AttentionSpec, LayerGroup, ModelConfig
from naiad.config.attention import RopeConfig
from naiad.config.families.gemma import GemmaConfig
from naiad.errors import ModelError

# As in the published 1B checkpoint, and as transformers 5 writes the same configuration.
GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "eos_token_id": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def parse(base: dict[str, Any], **changes: Any) -> GemmaConfig:
    config = ModelConfig.from_json({**base, **changes}, {})
    assert isinstance(config, GemmaConfig)
    return config


def test_every_sixth_layer_of_gemma_3_has_no_window() -> None:
    config = parse(GEMMA_3)
    full = (5, 11, 17, 23)
    sliding = tuple(index for index in range(26) if index not in full)
    assert config.layer_groups == (LayerGroup(0, full), LayerGroup(512, sliding))
    assert config.qk_norm
    assert config.tie_word_embeddings
    assert config.final_soft_cap == 0


@pytest.mark.parametrize("window", [32769, 2**31, 2**32 + 16])
def test_a_window_wider_than_the_context_is_as_wide_as_it(window: int) -> None:
    """Kernels have 32 bits for a window, so wider ones would become others without a word."""
    config = parse(GEMMA_3, sliding_window=window)
    assert [spec.window for spec in config.attention[4:6]] == [32768, 0]


def test_layers_of_gemma_3_have_the_rope_of_their_kind() -> None:
    config = parse(GEMMA_3, rope_scaling=LINEAR)
    scale = 256**-0.5
    assert config.attention[0] == AttentionSpec(scale=scale, window=512, rope=RopeConfig(theta=1e4))
    rope = RopeConfig(rope_type="linear", theta=1e6, factor=8.0)
    assert config.attention[5] == AttentionSpec(scale=scale, rope=rope)


def test_both_spellings_of_gemma_3_agree() -> None:
    old = parse(GEMMA_3, rope_scaling=LINEAR)
    new = {key: value for key, value in GEMMA_3.items() if not key.startswith(("rope", "sliding_window_p"))}
    new["layer_types"] = ["full_attention" if each % 6 == 5 else "sliding_attention" for each in range(26)]
    new["rope_parameters"] = {
        "full_attention": {**LINEAR, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert parse(new) == old
    assert parse({**GEMMA_3, **new}, rope_scaling=LINEAR) == old


def test_ropes_that_are_left_out_are_gemmas() -> None:
    config = parse({key: value for key, value in GEMMA_3.items() if not key.startswith("rope")})
    assert [spec.rope.theta for spec in config.attention[4:6]] == [1e4, 1e6]


def test_gemma_2_alternates_and_caps() -> None:
    config = parse(GEMMA_2)
    assert config.layer_groups == (LayerGroup(0, (1, 3)), LayerGroup(4096, (0, 2)))
    assert {spec.soft_cap for spec in config.attention} == {50.0}
    assert config.final_soft_cap == 30
    assert (config.head_dim, config.num_kv_heads, config.max_position_embeddings) == (256, 4, 8192)
    assert config.tie_word_embeddings
    assert not config.qk_norm


def test_a_cap_of_null_is_none() -> None:
    config = parse(GEMMA_2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert config.attention[0].soft_cap == config.final_soft_cap == 0


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GEMMA_2, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        (GEMMA_3, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA_3, {"layer_types": ["chunked_attention"] * 26}, "layer_types = "),
        (GEMMA_3, {"layer_types": ["full_attention"]}, "layer_types = .*for each of 26 layers"),
        (GEMMA_3, {"sliding_window": None}, "sliding_window = None"),
        (GEMMA_3, {"sliding_window": 0}, "sliding_window = 0"),
        (GEMMA_3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        (GEMMA_2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0"),
        (GEMMA_3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 .*expected null"),
        (GEMMA_3, {"final_logit_softcapping": "x"}, "final_logit_softcapping = 'x'"),
        (GEMMA_3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters = "),
        (
            GEMMA_3,
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            r"rope_parameters\.full_attention\.rope_theta = .*what rope_theta says",
        ),
        (
            GEMMA_3,
            {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope_scaling = .*what rope_parameters\.full_attention says",
        ),
        (
            GEMMA_3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            r"rope_parameters\.sliding_attention\.rope_type = 'yarn'",
        ),
        (GEMMA_3, {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_gemma_does_not_follow_is_refused(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        parse(base, **changes)


def test_vision_checkpoints_are_refused_by_name() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": GEMMA_3,
        "vision_config": {"hidden_size": 1152},
    }
    with pytest.raises(ModelError, match=r"Gemma3ForConditionalGeneration.*without images or audio"):
        ModelConfig.from_json(config, {})


def test_the_first_layers_of_a_model_keep_its_groups() -> None:
    config = replace(parse(GEMMA_3), num_layers=2)
    assert config.layer_groups == (LayerGroup(0, ()), LayerGroup(512, (0, 1)))
