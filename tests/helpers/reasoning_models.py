"""A tiny random checkpoint that writes `<think>` … `</think>` if it is pushed to."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from helpers.tiny_models import make_tiny_model
from helpers.tiny_tokenizers import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer

BEGIN, END = "<think>", "</think>"
# `thinking`: "open" begins to reason, "closed" says that there is nothing to reason; else the model decides.
TEMPLATE = CHAT_TEMPLATE.replace(
    "assistant\n' }}",
    "assistant\n' }}{% if thinking == 'open' %}{{ '<think>\n' }}"
    "{% elif thinking == 'closed' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)


def reasoning_tokenizer() -> Tokenizer:
    """A tokenizer whose marks are tokens of their own."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(BEGIN, normalized=False), AddedToken(END, normalized=False)])
    return tokenizer


def reasoning_checkpoint(folder: Path) -> Path:
    """Write the checkpoint."""
    tokenizer = reasoning_tokenizer()
    vocabulary = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id("</s>")}
    make_tiny_model(folder, max_position_embeddings=32_768, **vocabulary)
    return write_tokenizer(folder, tokenizer, TEMPLATE)
