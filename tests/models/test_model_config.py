from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from naiad.config import ModelConfig
from naiad.config.attention import RopeConfig
from naiad.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_json({**LLAMA, **changes}, generation or {})


def rope(config: ModelConfig) -> RopeConfig:
    (only,) = {spec.rope for spec in config.attention}
    return only


def test_head_dim_defaults_to_hidden_over_heads() -> None:
    assert parse().head_dim == 8


def test_kv_heads_default_to_heads() -> None:
    assert parse(num_key_value_heads=None).num_kv_heads == 6


def test_eos_ids_are_the_union_of_both_files() -> None:
    assert parse({"eos_token_id": [7, 2]}, eos_token_id=[2, 5]).eos_token_ids == (2, 5, 7)


def test_old_and_new_rope_spellings_agree() -> None:
    old = parse(rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    new = parse(rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    assert rope(old) == rope(new)
    assert rope(old).theta == 5e5


def test_the_old_type_key_is_read() -> None:
    assert rope(parse(rope_scaling={"type": "linear", "factor": 2})).rope_type == "linear"


def test_both_rope_spellings_may_stand_beside_each_other() -> None:
    both = parse(
        rope_theta=5e5, rope_scaling=LLAMA3_ROPE, rope_parameters={**LLAMA3_ROPE, "rope_theta": 500_000}
    )
    assert rope(both) == rope(parse(rope_theta=5e5, rope_scaling=LLAMA3_ROPE))


def test_the_theta_beside_rope_parameters_counts() -> None:
    assert rope(parse(rope_theta=5e5, rope_parameters={"rope_type": "default"})).theta == 5e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_scaling = .*expected what rope_parameters says",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling = .*expected what rope_parameters says",
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_parameters\.rope_theta = 10000\.0 .*expected what rope_theta says, 500000\.0",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_scaling\.rope_type = 'yarn'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "type": "linear", "factor": 2.0}},
            r"rope_scaling\.type = 'linear' .*rope_type says, 'llama3'",
        ),
        ({"rope_scaling": {"rope_type": ["default"]}}, r"rope_scaling\.rope_type = \['default'\]"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters = .*the same for every layer",
        ),
    ],
)
def test_contradicting_or_unknown_rope_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "o_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", False, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", False, False, True),
    ],
)
def test_families_differ_in_biases_and_norms(
    architecture: str, qkv_bias: bool, o_bias: bool, qk_norm: bool
) -> None:
    config = parse(architectures=[architecture])
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (qkv_bias, o_bias, qk_norm)


def test_attention_bias_of_llama_covers_the_output_projection() -> None:
    config = parse(attention_bias=True)
    assert config.qkv_bias
    assert config.o_bias


def test_mistral_without_a_window_says_so() -> None:
    config = parse(architectures=["MistralForCausalLM"], sliding_window=None)
    assert {spec.window for spec in config.attention} == {0}


def test_a_qwen_window_that_is_off_is_accepted() -> None:
    config = parse(architectures=["Qwen2ForCausalLM"], sliding_window=4096, use_sliding_window=False)
    assert config.architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures", "MambaForCausalLM"),
        ({"architectures": None}, "architectures", "None"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures", "[['LlamaForCausalLM']]"),
        ({"architectures": [{}]}, "architectures", "[{}]"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map", "x.Y"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method", "None"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type", "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor", "None"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window", "4096"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window", "4096"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window", "True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding_attention"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "4"),
        ({"hidden_size": "48"}, "hidden_size", "48"),
        ({"vocab_size": None}, "vocab_size", "None"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "0"),
        ({"rope_theta": 10**400}, "rope_theta", "10000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "yes"),
        ({"eos_token_id": 100}, "eos_token_id", "100"),
        ({"dtype": "float8"}, "dtype", "float8"),
        ({"head_dim": 7}, "head_dim", "7"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changes: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(**changes)
    assert key in str(caught.value)
    assert value in str(caught.value)


def test_an_unknown_architecture_is_told_what_is_supported() -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        parse(architectures=["GPT2LMHeadModel"])


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="JSON"):
        ModelConfig.from_directory(tmp_path)


def test_generation_config_is_read_from_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (2, 9)
