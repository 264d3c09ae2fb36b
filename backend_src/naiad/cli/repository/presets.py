"""Presets: which of the shipped models a new repository gets, and their names there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from naiad.cli.repository.model_entries import find_repository

# Shipped model → its name in the repository.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "naiad": {name: name for name in ("ensemble", "tokenizer", "llm", "detokenizer", "text")},
    "trtllm": {
        "ensemble": "ensemble",
        "tokenizer": "preprocessing",
        "llm": "tensorrt_llm",
        "detokenizer": "postprocessing",
        "text": "tensorrt_llm_bls",
    },
    "vllm": {"llm": "llm", "vllm": "vllm_model"},
}
# Models that must stay decoupled: the vLLM backend's model always is.
ALWAYS_DECOUPLED = ("vllm",)


def shipped_model(name: str) -> Path:
    """The directory of a shipped model, in the package's repository or among the templates."""
    served = find_repository(None) / name
    return served if served.is_dir() else Path(__file__).parent / "templates" / name
