"""Repositories of tiny random models, as `naiad repository` writes them."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.tiny_models import make_tiny_model
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.cli.main import main

# What names the token that ends a text, in each of a checkpoint's files that may.
_END_OF = {
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
}

# Room for a request that fills the window.
_BUDGET_BYTES = "20000000"


def tiny_checkpoint(folder: Path, seed: int = 0, num_layers: int = 3) -> Path:
    """Write a tiny random checkpoint with a tokenizer. Its window is long, so that a text need not end."""
    tokenizer = byte_level_tokenizer()
    vocabulary = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id("</s>")}
    sizes = {"max_position_embeddings": 32_768, "num_hidden_layers": num_layers}
    make_tiny_model(folder, seed=seed, **sizes, **vocabulary)
    return write_tokenizer(folder, tokenizer)


def endless_checkpoint(folder: Path) -> Path:
    """Write a tiny random checkpoint whose texts end by their length only."""
    tiny_checkpoint(folder)
    for name, key in _END_OF.items():
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | {key: None}), encoding="utf-8")
    return folder


def create_repository(folder: Path, checkpoint: Path, *options: str) -> None:
    """Create a repository of one model, "first"."""
    _naiad("create", checkpoint, "first", folder, *options)


def add_to_repository(folder: Path, checkpoint: Path, name: str, *options: str) -> None:
    """Add another model."""
    _naiad("add", checkpoint, name, folder, *options)


def _naiad(action: str, checkpoint: Path, name: str, folder: Path, *options: str) -> None:
    words = ["--model", str(checkpoint), "--name", name, "--kv-cache-bytes", _BUDGET_BYTES]
    # A fixed token budget makes the start quick, because it need not be measured.
    words += ["--dtype", "float32", "--max-num-batched-tokens", "256", *options, str(folder)]
    assert main(["repository", action, *words]) == 0
