"""Checkpoints with random weights, on which the cost of a step does not depend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8_192,
}
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def write_random_checkpoint(directory: Path, shape: dict[str, Any], dtype: str, device: str) -> Path:
    """Draw the weights and write a checkpoint that the engine and `transformers` can load.

    Args:
        directory: the destination; the 8B shape takes 16 GB in 16 bits.
        shape: the model's shape, for example `LLAMA_3_8B`.
        dtype: torch's name for the dtype of the weights.
        device: the device that draws them.

    Returns:
        The directory.
    """
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(directory)
    # The tokens are never decoded, but an engine requires a tokenizer.
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
