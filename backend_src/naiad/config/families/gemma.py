"""The Gemma family: Gemma 2, and Gemma 3 for text only."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.config.attention import DEFAULT_ROPE_THETA, AttentionSpec, RopeConfig
from naiad.config.checkpoint_json import Json, bad_value, flag, positive_float, positive_int
from naiad.config.families.common import common_fields, even_head_dim
from naiad.config.model_config import ModelConfig
from naiad.config.rope_keys import agreed_theta, read_rope, rope_object

_GEMMA_2, _GEMMA_3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
ARCHITECTURES = (_GEMMA_2, _GEMMA_3)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACTIVATION = "gelu_pytorch_tanh"
_HEAD_DIM = 256
# Defaults of keys that files may leave out, as in transformers.
_DEFAULTS: dict[str, object] = {
    "head_dim": _HEAD_DIM,
    "num_key_value_heads": 4,
    "hidden_activation": _ACTIVATION,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS_BY_ARCHITECTURE: dict[str, dict[str, object]] = {
    _GEMMA_2: {
        "max_position_embeddings": 8_192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    _GEMMA_3: {"max_position_embeddings": 131_072},
}
# Default period of the layers without a window: every second layer, or every sixth.
_PATTERN = {_GEMMA_2: 2, _GEMMA_3: 6}
_GLOBAL_THETA = 1_000_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaConfig(ModelConfig):
    """The shape of a Gemma checkpoint.

    Attributes:
        attention_bias: whether the four projections of attention have biases.
        qk_norm: whether each query and key head is RMS-normed before rotation.
        final_soft_cap: if c > 0, logits become c · tanh(logit / c); 0: logits are not capped.
    """

    attention_bias: bool
    qk_norm: bool
    final_soft_cap: float


def read_config(config: Json, generation: Json) -> GemmaConfig:
    """Read the family's keys.

    Raises:
        ModelError: a key is missing or has a value that the forward pass does not support.
    """
    architecture = str(config["architectures"][0])
    config = {**_DEFAULTS, **_DEFAULTS_BY_ARCHITECTURE[architecture], **config}
    fields = common_fields(config, generation)
    if config["hidden_activation"] != _ACTIVATION:
        raise bad_value("hidden_activation", config["hidden_activation"], repr(_ACTIVATION))
    if config.get("use_bidirectional_attention"):
        raise bad_value("use_bidirectional_attention", config["use_bidirectional_attention"], "false or null")
    kinds = _layer_types(config, architecture, fields["num_layers"])
    specs = _specs(config, architecture, fields["max_position_embeddings"], set(kinds))
    return GemmaConfig(
        **fields,
        head_dim=even_head_dim(config, _HEAD_DIM),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        attention=tuple(specs[kind] for kind in kinds),
        attention_bias=flag(config, "attention_bias"),
        qk_norm=architecture == _GEMMA_3,
        final_soft_cap=_soft_cap(config, "final_logit_softcapping"),
    )


def _layer_types(config: Json, architecture: str, num_layers: int) -> list[str]:
    """Read the type of each layer; older files give only a period, or nothing."""
    kinds = config.get("layer_types")
    if kinds is None:
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in config else "sliding_window_pattern"
        pattern = positive_int(config, key, _PATTERN[architecture])
        return [_SLIDING if (index + 1) % pattern else _FULL for index in range(num_layers)]
    is_known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not is_known or len(kinds) != num_layers:
        raise bad_value("layer_types", kinds, f"{_FULL!r} or {_SLIDING!r} for each of {num_layers} layers")
    return list(kinds)


def _specs(config: Json, architecture: str, max_positions: int, kinds: set[str]) -> dict[str, AttentionSpec]:
    if architecture == _GEMMA_2:
        ropes = dict.fromkeys(kinds, read_rope(config, max_positions))
    else:
        ropes = _ropes_by_kind(config, max_positions)
    scale = positive_float(config, "query_pre_attn_scalar") ** -0.5
    soft_cap = _soft_cap(config, "attn_logit_softcapping")
    # transformers has the key for Gemma 3 too and does nothing with it.
    if architecture == _GEMMA_3 and soft_cap:
        raise bad_value("attn_logit_softcapping", config["attn_logit_softcapping"], "null")
    windows = {_FULL: 0}
    if _SLIDING in kinds:
        # No token has more tokens before it. Kernels have 32 bits for a window.
        windows[_SLIDING] = min(positive_int(config, "sliding_window"), max_positions)
    return {
        kind: AttentionSpec(scale=scale, window=windows[kind], soft_cap=soft_cap, rope=ropes[kind])
        for kind in kinds
    }


def _ropes_by_kind(config: Json, max_positions: int) -> dict[str, RopeConfig]:
    """Read both formats; if a file has both, they must agree.

    Older files have rope_theta and rope_scaling for the layers without a window, and rope_local_base_freq for
    the others. Newer files have an object for each type of layer in rope_parameters.
    """
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or not set(parameters) <= {_FULL, _SLIDING}:
        raise bad_value("rope_parameters", parameters, f"an object with {_FULL!r} and {_SLIDING!r}")
    ropes = {}
    for kind, old_key, default in (
        (_FULL, "rope_theta", _GLOBAL_THETA),
        (_SLIDING, "rope_local_base_freq", DEFAULT_ROPE_THETA),
    ):
        name, rope = f"rope_parameters.{kind}", parameters.get(kind) or {}
        scaling = config.get("rope_scaling") if kind == _FULL else None
        thetas = {old_key: config[old_key]} if config.get(old_key) is not None else {}
        if isinstance(rope, dict) and rope.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = rope["rope_theta"]
        theta = agreed_theta(thetas, default)
        ropes[kind] = rope_object(rope, name, theta, max_positions)
        if scaling:
            old = rope_object(scaling, "rope_scaling", theta, max_positions)
            if rope and old != ropes[kind]:
                raise bad_value("rope_scaling", scaling, f"what {name} says, or null")
            ropes[kind] = old
    return ropes


def _soft_cap(config: Json, key: str) -> float:
    return 0.0 if config.get(key) is None else positive_float(config, key)
