"""`ModelConfig`: what a checkpoint's config.json says, and a refusal of all we would not honour."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from naiad.errors import ModelError

_Json = Mapping[str, Any]

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_ROPE_THETA = 10_000.0
_ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        rope_type: "default", "linear" (all frequencies divided by `factor`) or "llama3" (low
            frequencies divided by `factor`, high ones kept, a ramp in between).
        theta: base of the frequencies.
        factor: for linear and llama3.
        low_freq_factor, high_freq_factor, original_max_position_embeddings: for llama3.
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_ROPE_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family checkpoint.

    Attributes:
        architecture: one of `SUPPORTED_ARCHITECTURES`.
        head_dim: features of one head; num_heads × head_dim need not be hidden_size.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: whether each query and key head is RMS-normed before rotation.
        eos_token_ids: every id that ends a text, of config.json and generation_config.json.
        dtype: of the weights as they are stored.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read config.json (and generation_config.json, if there) of a checkpoint directory.

        Raises:
            ModelError: a file is missing or no JSON object, a key is missing or has a value we
                do not support; names the key and the value.
        """
        directory = Path(path)
        config = _read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return cls.from_json(config, generation)

    @classmethod
    def from_json(cls, config: _Json, generation: _Json) -> ModelConfig:
        """Build from the two parsed files; raises as `from_directory` does."""
        architecture = _architecture(config)
        _refuse_unsupported(config, architecture)
        hidden_size = _positive_int(config, "hidden_size")
        num_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise _bad("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}")
        attention_bias = _flag(config, "attention_bias") and architecture != "MistralForCausalLM"
        vocab_size = _positive_int(config, "vocab_size")
        max_positions = _positive_int(config, "max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_layers=_positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, architecture, hidden_size, num_heads),
            rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            rope=_rope(config, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=_flag(config, "mlp_bias") and architecture == "LlamaForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_token_ids=_eos_token_ids(config, generation, vocab_size),
            dtype=_dtype(config),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: expected a model directory with {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _bad(key: str, value: object, expected: str) -> ModelError:
    return ModelError(f"config.json: {key} = {value!r} is not supported: expected {expected}")


def _architecture(config: _Json) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise _bad("architectures", names, f"one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(config: _Json, architecture: str) -> None:
    """Refuse keys that change the computation in ways the forward pass does not follow."""
    if config.get("auto_map"):
        raise _bad("auto_map", config["auto_map"], "none: code from a checkpoint is never run")
    if config.get("quantization_config"):
        raise _bad("quantization_config", config["quantization_config"], "none: weights in full precision")
    if config.get("hidden_act", "silu") != "silu":
        raise _bad("hidden_act", config["hidden_act"], "'silu'")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise _bad("partial_rotary_factor", config["partial_rotary_factor"], "1.0")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise _bad("pretraining_tp", config["pretraining_tp"], "1")
    _refuse_sliding_window(config, architecture)


def _refuse_sliding_window(config: _Json, architecture: str) -> None:
    if config.get("use_sliding_window"):
        raise _bad("use_sliding_window", config["use_sliding_window"], "false")
    # Qwen checkpoints carry a window that use_sliding_window = false turns off.
    window = config.get("sliding_window")
    if window is not None and not architecture.startswith("Qwen"):
        raise _bad("sliding_window", window, "null")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise _bad("layer_types", layer_types, "'full_attention' in every layer")


def _head_dim(config: _Json, architecture: str, hidden_size: int, num_heads: int) -> int:
    # Qwen3's head_dim is 128 unless the file says otherwise; the other families divide.
    default = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    head_dim = _positive_int(config, "head_dim", default)
    if head_dim % 2:
        raise _bad("head_dim", head_dim, "an even number")
    return head_dim


def _rope(config: _Json, max_positions: int) -> RopeConfig:
    """Read both spellings, rope_theta + rope_scaling and rope_parameters; where both are, they agree."""
    theta = _rope_theta(config)
    ropes = {key: _rope_object(config, key, theta, max_positions) for key in _ROPE_OBJECTS if config.get(key)}
    old, new = (ropes.get(key) for key in _ROPE_OBJECTS)
    if old is not None and new is not None and old != new:
        raise _bad("rope_scaling", config["rope_scaling"], "what rope_parameters says, or null")
    return new or old or RopeConfig(theta=theta)


def _rope_theta(config: _Json) -> float:
    thetas: dict[str, float] = {}
    for prefix, source in (("", config), *((f"{key}.", config.get(key)) for key in _ROPE_OBJECTS)):
        if isinstance(source, dict) and source.get("rope_theta") is not None:
            thetas[f"{prefix}rope_theta"] = _positive_float(source, "rope_theta")
    if not thetas:
        return _DEFAULT_ROPE_THETA
    (first, theta), *others = thetas.items()
    for key, other in others:
        if other != theta:
            raise _bad(key, other, f"what {first} says, {theta!r}")
    return theta


def _rope_object(config: _Json, key: str, theta: float, max_positions: int) -> RopeConfig:
    rope = config[key]
    if not isinstance(rope, dict):
        raise _bad(key, rope, "an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise _bad(key, rope, "the same for every layer")
    rope_type = _rope_type(rope, key)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _bad(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = _positive_float(rope, "factor")
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    low, high = _positive_float(rope, "low_freq_factor"), _positive_float(rope, "high_freq_factor")
    if high <= low:
        raise _bad(f"{key}.high_freq_factor", high, f"more than low_freq_factor = {low}")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_positive_int(
            rope, "original_max_position_embeddings", max_positions
        ),
    )


def _rope_type(rope: _Json, key: str) -> str:
    # `type` is the older name.
    names = {name: rope[name] for name in ("rope_type", "type") if name in rope}
    for name, value in names.items():
        if value not in _ROPE_TYPES:
            raise _bad(f"{key}.{name}", value, "'default', 'linear' or 'llama3'")
    if len(set(names.values())) > 1:
        raise _bad(f"{key}.type", names["type"], f"what {key}.rope_type says, {names['rope_type']!r}")
    return next(iter(names.values()), "default")


def _eos_token_ids(config: _Json, generation: _Json, vocab_size: int) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        if value is None:
            continue
        for token_id in value if isinstance(value, list) else [value]:
            if not _is_int(token_id) or not 0 <= token_id < vocab_size:
                raise _bad("eos_token_id", value, f"ids in [0, vocab_size = {vocab_size})")
            ids.add(token_id)
    return tuple(sorted(ids))


def _dtype(config: _Json) -> str:
    dtype = config.get("dtype", config.get("torch_dtype")) or "float32"
    if dtype not in _CHECKPOINT_DTYPES:
        raise _bad("dtype", dtype, f"one of {', '.join(_CHECKPOINT_DTYPES)}")
    return str(dtype)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive_int(config: _Json, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or not _is_int(value) or value < 1:
        raise _bad(key, value, "a positive whole number")
    return value


def _positive_float(config: _Json, key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise _bad(key, value, "a positive number")
    return float(value)


def _flag(config: _Json, key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _bad(key, value, "true or false")
    return bool(value)
