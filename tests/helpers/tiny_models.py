"""Tiny random checkpoints of each supported family, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

# Head counts and sizes that are not powers of two, and a head_dim other than hidden_size / num_heads.
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
    # Five layers with windows shorter than a prompt, and one without; all optional parts are present.
    "Gemma3ForCausalLM": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            "num_hidden_layers": 7,
            "sliding_window": 21,
            "query_pre_attn_scalar": 14,
            "final_logit_softcapping": 8.0,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "initializer_range": 0.15,
        },
    ),
    "Gemma2ForCausalLM": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {
            "num_hidden_layers": 4,
            "sliding_window": 21,
            "query_pre_attn_scalar": 14,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
            "initializer_range": 0.15,
        },
    ),
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

    Biases and norm weights are random too, so that omitting one changes the result.
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
                # Gemma scales by 1 + weight.
                low = -0.5 if architecture.startswith("Gemma") else 0.5
                parameter.uniform_(low, low + 1)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
