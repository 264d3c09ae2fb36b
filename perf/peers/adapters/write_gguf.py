"""Writes a Llama checkpoint of the Hugging Face format as GGUF.

    python write_gguf.py DIR OUT.gguf {BF16,Q4_0,Q4_1,Q8_0}

Matrices are written in the named type and vectors in float32, as llama.cpp's own converter does it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Array = npt.NDArray[np.float32]


def main(folder: Path, out: Path, type_name: str) -> None:
    """Convert a Llama with plain RoPE, whose weights are in one file in bfloat16 or float32."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama" or config["rope_parameters"]["rope_type"] != "default":
        raise SystemExit(
            f"{folder}: model_type is {config['model_type']}; only llama with plain RoPE is converted"
        )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    kind = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(out, "llama")
    _write_settings(writer, config)
    _write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config["vocab_size"])
    for name, array in read_safetensors(folder / "model.safetensors"):
        part = gguf_name(name)
        short = part.split(".")[-2]
        if short in heads:
            array = interleave_halves(array, heads[short])
        if array.ndim == 1:
            writer.add_tensor(part, array)
        else:
            writer.add_tensor(part, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """The name of a Hugging Face weight in GGUF."""
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.weight"


def interleave_halves(array: Array, num_heads: int) -> Array:
    """Reorder the rows of each head from two halves, as Hugging Face rotates them, to neighbouring pairs."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, array.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def read_safetensors(path: Path) -> list[tuple[str, Array]]:
    """Read all weights of a file as float32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    weights = []
    for name, entry in header.items():
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(data[start:end], np.uint16).astype(np.uint32) << 16
            array = bits.view(np.float32)
        elif entry["dtype"] == "F32":
            array = np.frombuffer(data[start:end], np.float32)
        else:
            raise SystemExit(f"{path}: {name} is {entry['dtype']}; BF16 and F32 are converted")
        weights.append((name, array.reshape(entry["shape"])))
    return weights


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, object]) -> None:
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], vocab_size: int) -> None:
    """Write byte-level BPE that is cut as SmolLM's; nothing but token ids is measured."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
