"""Reads the keys that all families have in common."""

from __future__ import annotations

from typing import Any

from naiad.config.checkpoint_json import Json, bad_value, is_int, positive_float, positive_int
from naiad.config.quantised import read_quantised_weights

_CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


def common_fields(config: Json, generation: Json) -> dict[str, Any]:
    """Read the fields of `ModelConfig` other than head_dim, tie_word_embeddings and attention.

    Args:
        config: the parsed config.json, with one architecture.
        generation: the parsed generation_config.json, or empty.

    Raises:
        ModelError: a key is missing or has a value that no family supports.
    """
    _refuse_unsupported(config)
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise bad_value(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}"
        )
    vocab_size = positive_int(config, "vocab_size")
    return {
        "architecture": config["architectures"][0],
        "vocab_size": vocab_size,
        "hidden_size": positive_int(config, "hidden_size"),
        "intermediate_size": positive_int(config, "intermediate_size"),
        "num_layers": positive_int(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "rms_norm_eps": positive_float(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": positive_int(config, "max_position_embeddings"),
        "eos_token_ids": _eos_token_ids(config, generation, vocab_size),
        "dtype": _dtype(config),
        "quantised": read_quantised_weights(config),
    }


def even_head_dim(config: Json, default: int) -> int:
    """Read the number of features of a head, which must be even for the rotary embedding.

    Args:
        config: the parsed config.json.
        default: the value if the key is missing or null.

    Raises:
        ModelError: the value is odd, or not a positive whole number.
    """
    head_dim = positive_int(config, "head_dim", default)
    if head_dim % 2:
        raise bad_value("head_dim", head_dim, "an even number")
    return head_dim


def _refuse_unsupported(config: Json) -> None:
    """Refuse keys that change the computation in ways that no forward pass implements."""
    if config.get("auto_map"):
        raise bad_value("auto_map", config["auto_map"], "none: code from a checkpoint is never run")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise bad_value("partial_rotary_factor", config["partial_rotary_factor"], "1.0")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise bad_value("pretraining_tp", config["pretraining_tp"], "1")


def _eos_token_ids(config: Json, generation: Json, vocab_size: int) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        if value is None:
            continue
        for token_id in value if isinstance(value, list) else [value]:
            if not is_int(token_id) or not 0 <= token_id < vocab_size:
                raise bad_value("eos_token_id", value, f"ids in [0, vocab_size = {vocab_size})")
            ids.add(token_id)
    return tuple(sorted(ids))


def _dtype(config: Json) -> str:
    dtype = config.get("dtype", config.get("torch_dtype")) or "float32"
    if dtype not in _CHECKPOINT_DTYPES:
        raise bad_value("dtype", dtype, f"one of {', '.join(_CHECKPOINT_DTYPES)}")
    return str(dtype)
