"""Tiny random checkpoints of each supported family, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

# Head counts and sizes that are no powers of two, and a head_dim that is not hidden / heads.
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 96,
}
_FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "LlamaForCausalLM": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "MistralForCausalLM": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"sliding_window": None},
    ),
    # Qwen2 has no head_dim of its own.
    "Qwen2ForCausalLM": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"head_dim": 6}),
    "Qwen3ForCausalLM": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
}
ARCHITECTURES = tuple(_FAMILIES)


def make_tiny_model(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    max_shard_size: str = "1GB",
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """Save a random float32 checkpoint and return the transformers model it came from.

    Biases and norm weights are random too, so that leaving one out is seen.
    """
    config_class, model_class, family = _FAMILIES[architecture]
    config = config_class(**{**_SIZES, **family, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
