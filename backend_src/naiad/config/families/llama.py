"""The Llama family: Llama, Mistral, Qwen2 and Qwen3 (dense)."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.config.attention import AttentionSpec
from naiad.config.checkpoint_json import Json, bad_value, flag
from naiad.config.families.common import common_fields, even_head_dim
from naiad.config.model_config import ModelConfig
from naiad.config.rope_keys import read_rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Where the key is missing, as in transformers.
_MISTRAL_WINDOW = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(ModelConfig):
    """The shape of a Llama-family checkpoint.

    Attributes:
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: whether each query and key head is RMS-normed before rotation.
    """

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read_config(config: Json, generation: Json) -> LlamaConfig:
    """Read the family's keys.

    Raises:
        ModelError: a key is missing or has a value that the forward pass does not support.
    """
    architecture = str(config["architectures"][0])
    fields = common_fields(config, generation)
    if config.get("hidden_act", "silu") != "silu":
        raise bad_value("hidden_act", config["hidden_act"], "'silu'")
    _refuse_sliding_window(config, architecture)
    # By default Qwen3's head_dim is 128; the other architectures divide hidden_size by num_heads.
    divided = fields["hidden_size"] // fields["num_heads"]
    head_dim = even_head_dim(config, 128 if architecture == "Qwen3ForCausalLM" else divided)
    rope = read_rope(config, fields["max_position_embeddings"])
    attention_bias = flag(config, "attention_bias") and architecture != "MistralForCausalLM"
    return LlamaConfig(
        **fields,
        head_dim=head_dim,
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention=(AttentionSpec(scale=head_dim**-0.5, rope=rope),) * fields["num_layers"],
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=flag(config, "mlp_bias") and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _refuse_sliding_window(config: Json, architecture: str) -> None:
    if config.get("use_sliding_window"):
        raise bad_value("use_sliding_window", config["use_sliding_window"], "false")
    # Qwen checkpoints have a sliding_window that use_sliding_window = false turns off.
    is_missing = architecture == "MistralForCausalLM" and "sliding_window" not in config
    window = _MISTRAL_WINDOW if is_missing else config.get("sliding_window")
    if window is not None and not architecture.startswith("Qwen"):
        expected = "null, which is not the default of this architecture" if is_missing else "null"
        raise bad_value("sliding_window", window, expected)
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise bad_value("layer_types", layer_types, "'full_attention' in every layer")
