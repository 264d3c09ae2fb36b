"""A checkpoint whose files pass the checks before a start but are empty."""

from __future__ import annotations

import json
from pathlib import Path


def write_checkpoint(folder: Path, num_bytes: int = 4) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shape = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}
    header = json.dumps({"w": shape}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
