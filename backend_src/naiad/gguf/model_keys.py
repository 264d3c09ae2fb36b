"""What a GGUF file says about its model, in the words of config.json and generation_config.json."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGMLQuantizationType

from naiad.gguf.file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
_TOKENS = "tokenizer.ggml.tokens"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# A key after "ARCHITECTURE." → a key of config.json that needs no further reading.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_OPTIONAL_KEYS = ("attention.head_count_kv", "rope.freq_base")
_HEAD_KEYS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_ROPE_KEYS = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
# Keys that change nothing at these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.original_context_length": (),
}
# Llama 3.1 and later write their factors of the rope as a tensor; these settings made them.
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FACTOR_TOLERANCE = 1e-3
_END_TOKENS = ("eos_token_id", "eot_token_id")


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """The two files' content."""

    config: dict[str, Any]
    generation: dict[str, Any]


def read_model_keys(file: GGUFFile) -> ModelKeys:
    """Translate the metadata.

    Raises:
        ModelError: the architecture is not supported, or a key is missing, unknown or has an unsupported
            value.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise file.bad_key("general.architecture", architecture, f"one of {', '.join(_ARCHITECTURES)}")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[architecture]], "dtype": "float32"}
    for key, name in _KEYS.items():
        value = own.pop(key, None)
        if value is not None:
            config[name] = _one_value(file, prefix + key, value)
        elif key not in _OPTIONAL_KEYS:
            raise file.bad_key(prefix + key, value, "a number")
    config["vocab_size"] = _vocab_size(file, own.pop("vocab_size", None))
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    head_dim = _head_dim(file, prefix, own, config)
    config["head_dim"] = head_dim
    config |= _rope(file, prefix, own, head_dim)
    _refuse_others(file, prefix, own)
    return ModelKeys(config, {"eos_token_id": _end_ids(file)})


def _one_value(file: GGUFFile, key: str, value: Any) -> Any:
    """A number; some files give one for each layer."""
    if not isinstance(value, list):
        return value
    if len(set(map(repr, value))) != 1:
        raise file.bad_key(key, value, "the same for every layer")
    return value[0]


def _vocab_size(file: GGUFFile, said: Any) -> int:
    tokens = file.metadata.get(_TOKENS)
    if not isinstance(tokens, list) or not tokens:
        raise file.bad_key(_TOKENS, tokens, "a list of tokens")
    if said is not None and said != len(tokens):
        raise file.bad_key("vocab_size", said, f"{len(tokens)}, the number of tokens")
    return len(tokens)


def _head_dim(file: GGUFFile, prefix: str, own: dict[str, Any], config: dict[str, Any]) -> int:
    sizes = {key: own.pop(key) for key in _HEAD_KEYS if key in own}
    for key, size in sizes.items():
        first = next(iter(sizes.values()))
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size != first:
            raise file.bad_key(
                prefix + key, size, f"a number ≥ 1 that is the same for {', '.join(_HEAD_KEYS)}"
            )
    if sizes:
        return int(next(iter(sizes.values())))
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise file.bad_key(f"{prefix}attention.head_count", heads, "a number ≥ 1")
    return hidden // heads


def _rope(file: GGUFFile, prefix: str, own: dict[str, Any], head_dim: int) -> dict[str, Any]:
    kind, factor, linear = (own.pop(key, None) for key in _ROPE_KEYS)
    if kind not in (None, "none", "linear"):
        raise file.bad_key(f"{prefix}rope.scaling.type", kind, "'none' or 'linear'")
    if kind != "none" and linear is not None and factor is None:
        kind, factor = "linear", linear
    factors = _factors(file, head_dim)
    if factors is not None and kind == "linear":
        raise file.bad_key(f"{prefix}rope.scaling.type", kind, f"'none': there is a tensor {ROPE_FACTORS}")
    if factors is not None:
        return {"rope_scaling": _llama_3(file, prefix, factors)}
    if kind == "linear" and factor != 1.0:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {}


def _factors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """What each frequency of the rope is divided by; None: by nothing."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.kind != GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise file.bad_key(ROPE_FACTORS, f"{tensor.kind.name} {tensor.shape}", f"F32 ({head_dim // 2},)")
    factors: tuple[float, ...] = struct.unpack(f"<{head_dim // 2}f", file.data(tensor))
    if not all(math.isfinite(each) and each > 0 for each in factors):
        raise file.bad_key(ROPE_FACTORS, factors, "positive numbers")
    return None if all(each == 1.0 for each in factors) else factors


def _llama_3(file: GGUFFile, prefix: str, factors: tuple[float, ...]) -> dict[str, Any]:
    """The rope of type llama3 that has these factors."""
    factor, theta = max(factors), file.metadata.get(f"{prefix}rope.freq_base", 10000.0)
    if not isinstance(theta, float) or not 1.0 <= theta <= 1e12:
        raise file.bad_key(f"{prefix}rope.freq_base", theta, "a number in 1 … 10¹²")
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    for index, found in enumerate(factors):
        turns = _LLAMA_3["original_max_position_embeddings"] / (2 * math.pi * theta ** (index / len(factors)))
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - kept) / factor + kept)
        if abs(found - expected) > _FACTOR_TOLERANCE * expected:
            raise file.bad_key(ROPE_FACTORS, factors, f"those of Llama 3 with the factor {factor:g}")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA_3}


def _refuse_others(file: GGUFFile, prefix: str, own: dict[str, Any]) -> None:
    for key, value in own.items():
        if key not in _NEUTRAL:
            raise file.bad_key(prefix + key, value, "no such key: Naiad does not know what it means")
        if _NEUTRAL[key] and value not in _NEUTRAL[key]:
            expected = " or ".join(map(repr, _NEUTRAL[key]))
            raise file.bad_key(prefix + key, value, f"{expected}, or no such key")


def _end_ids(file: GGUFFile) -> list[Any]:
    keys = [f"tokenizer.ggml.{name}" for name in _END_TOKENS]
    return [file.metadata[key] for key in keys if key in file.metadata]
