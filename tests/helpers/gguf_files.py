"""Writes GGUF files of tiny models with the `gguf` package, as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """The name of a weight in GGUF."""
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, index, part = base.split(".", 3)
        return f"blk.{index}.{_PARTS[part]}.{kind}"
    return f"{_PARTS[base]}.{kind}"


def in_turns(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Put the two halves of each head in turns, as llama.cpp's converter does for Llama."""
    shape = rows.shape
    return rows.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tokens_of(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level vocabulary of `size` tokens: tokens, types, merges."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    merges = ["h e", "he l", "Ġ w"]
    tokens = ["<|im_start|>", "<|im_end|>", *letters, *(each.replace(" ", "") for each in merges)]
    kinds = [3, 3] + [1] * (len(tokens) - 2) + [5] * (size - len(tokens))
    return tokens + [f"[PAD{index}]" for index in range(size - len(tokens))], kinds, merges


def write_gguf(
    path: Path, model: Any, kind: str = "F32", changes: dict[str, Any] | None = None, **tensors: Any
) -> dict[str, torch.Tensor]:
    """Write a transformers model.

    Args:
        path: the new file.
        model: of one of the families that GGUF files may have here.
        kind: how the matrices are stored.
        changes: keys of the metadata to change, or, if None, to leave out.
        tensors: more tensors.

    Returns:
        The weights that the file stands for, by their names in the model.
    """
    config = model.config
    architecture = _ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_keys(config, architecture) | (changes or {})).items():
        _add_key(writer, key, value)
    meant: dict[str, torch.Tensor] = {}
    number = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = parameter.float().numpy()
        own_kind = number if rows.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = quantize(rows, own_kind)
        meant[name] = torch.from_numpy(np.array(dequantize(stored, own_kind), dtype=np.float32))
        for part, num_heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in name and architecture == "llama":
                stored = in_turns(stored, num_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=own_kind)
    for name, value in tensors.items():
        writer.add_tensor(name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def _keys(config: Any, architecture: str) -> dict[str, Any]:
    tokens, kinds, merges = tokens_of(config.vocab_size)
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own |= dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), head_dim)
    return {
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
