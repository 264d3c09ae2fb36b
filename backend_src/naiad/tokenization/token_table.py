"""The bytes of every token of a checkpoint.

Text is what a tokenizer's decoder makes of token strings. The decoders of the supported kinds
map each token by itself, apart from what happens at the very start of a text, so they reduce to
a table: id → bytes, and for some ids other bytes where they begin a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from naiad.errors import ModelError
from naiad.tokenization.checkpoint_tokenizer import CheckpointTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")

BytesOf = Callable[[str], bytes]


class TokenTable:
    """Token id → bytes. Ids outside the table make no text."""

    def __init__(
        self, token_bytes: list[bytes], first_bytes: dict[int, bytes], special_ids: frozenset[int]
    ) -> None:
        """Build from parts.

        Args:
            token_bytes: per id; empty where the id is unused.
            first_bytes: ids that have other bytes as the first visible token of a text.
            special_ids: ids skipped on demand.
        """
        self._all = token_bytes
        self._without_special = [
            b"" if token_id in special_ids else data for token_id, data in enumerate(token_bytes)
        ]
        self._first = first_bytes
        self._special_ids = special_ids

    @classmethod
    def from_directory(cls, model_dir: str | Path) -> TokenTable:
        """Build from the tokenizer files of `model_dir`.

        Raises:
            ModelError: a file is missing or damaged, or the decoder is not supported.
        """
        return cls.from_checkpoint(CheckpointTokenizer.load(model_dir))

    @classmethod
    def from_checkpoint(cls, checkpoint: CheckpointTokenizer) -> TokenTable:
        """Build from files that are read already.

        Raises:
            ModelError: the decoder is not supported.
        """
        vocabulary = checkpoint.tokenizer.get_vocab(with_added_tokens=True)
        decoder = json.loads(checkpoint.tokenizer.to_str()).get("decoder")
        bytes_of, first_bytes_of = _parse_decoder(decoder)
        token_bytes = [b""] * (1 + max(vocabulary.values(), default=-1))
        first_bytes = {}
        for token, token_id in vocabulary.items():
            data = token_bytes[token_id] = bytes_of(token)
            first = first_bytes_of(token)
            if first != data:
                first_bytes[token_id] = first
        return cls(token_bytes, first_bytes, checkpoint.special_ids)

    def __len__(self) -> int:
        """One more than the largest id."""
        return len(self._all)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids skipped by `skip_special_tokens`."""
        return self._special_ids

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """The token's bytes inside a text; empty if it is skipped or unknown."""
        if not 0 <= token_id < len(self._all):
            return b""
        return (self._without_special if skip_special_tokens else self._all)[token_id]

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a visible token where no visible token stands before it."""
        return self._first[token_id] if token_id in self._first else self._all[token_id]


def _parse_decoder(decoder: dict[str, Any] | None) -> tuple[BytesOf, BytesOf]:
    """What a token is inside a text, and at its start."""
    if decoder is None:
        raise ModelError("tokenizer.json has no decoder: ByteLevel, Metaspace or a Sequence is supported")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = [step["type"] for step in steps if step["type"] != "Fuse"]
    if types == ["ByteLevel"]:
        return _byte_level_bytes, _byte_level_bytes
    return _parse_steps(steps)


def _parse_steps(steps: list[dict[str, Any]]) -> tuple[BytesOf, BytesOf]:
    """Decoders of the SentencePiece kind."""
    replacements: list[tuple[str, str]] = []
    removed_at_start: str | None = None
    stripped_at_start: str | None = None
    has_bytes = is_fused = False
    for step in steps:
        kind = step["type"]
        if is_fused and kind != "Strip":
            raise ModelError(f"tokenizer.json: decoder {kind!r} after 'Fuse' is not supported")
        if kind == "Replace" and isinstance(step["pattern"].get("String"), str):
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and len(steps) == 1:
            replacements.append((step["replacement"], " "))
            if step.get("prepend_scheme", "always") != "never":
                removed_at_start = step["replacement"]
        elif kind == "ByteFallback":
            has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and step["start"] == 1 and step["stop"] == 0:
            stripped_at_start = step["content"]
        else:
            raise ModelError(f"tokenizer.json: decoder {kind!r} with these settings is not supported")

    def bytes_of(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return bytes([int(match[1], 16)]) if match else token.encode()

    def first_bytes_of(token: str) -> bytes:
        if removed_at_start is not None:
            token = token.replace(removed_at_start, "")
        data = bytes_of(token)
        return data.removeprefix(stripped_at_start.encode()) if stripped_at_start is not None else data

    return bytes_of, first_bytes_of


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 defined it.

    Bytes that print stand for themselves; the others, in order, for U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """The token's bytes; one with any other character is text as it stands (added tokens)."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
