"""The bytes of every token of a checkpoint.

A tokenizer's decoder turns token strings into text. The supported kinds of decoders
map each token by itself, except at the very start of a text. So they reduce to
a table: id → bytes, and for some ids other bytes at the start of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from naiad.errors import InvalidRequestError, ModelError
from naiad.tokenization.checkpoint_tokenizer import CheckpointTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")

BytesOf = Callable[[str], bytes]


class TokenTable:
    """Maps token ids to bytes. Ids outside the table produce no text."""

    def __init__(
        self, token_bytes: list[bytes], first_bytes: dict[int, bytes], special_ids: frozenset[int]
    ) -> None:
        """Build the table.

        Args:
            token_bytes: the bytes of each id; empty for unused ids.
            first_bytes: id → bytes, for ids that have other bytes as the first visible token of a text.
            special_ids: ids of special tokens, which produce no text if they are skipped.
        """
        self._all = token_bytes
        self._without_special = [
            b"" if token_id in special_ids else data for token_id, data in enumerate(token_bytes)
        ]
        self._first = first_bytes
        self._special_ids = special_ids

    @classmethod
    def from_directory(cls, model_dir: str | Path) -> TokenTable:
        """Build the table from the tokenizer files of `model_dir`.

        Raises:
            ModelError: a file is missing or damaged, or the decoder is not supported.
        """
        return cls.from_checkpoint(CheckpointTokenizer.load(model_dir))

    @classmethod
    def from_checkpoint(cls, checkpoint: CheckpointTokenizer) -> TokenTable:
        """Build the table of a checkpoint's tokenizer.

        Raises:
            ModelError: the decoder is not supported.
        """
        vocabulary = checkpoint.tokenizer.get_vocab(with_added_tokens=True)
        decoder = checkpoint.tokenizer.decoder
        # A decoder's pickled state is its JSON; writing the whole tokenizer as JSON takes far longer.
        description = None if decoder is None else json.loads(decoder.__getstate__())
        bytes_of, first_bytes_of = _parse_decoder(description)
        token_bytes = [b""] * (1 + max(vocabulary.values(), default=-1))
        first_bytes = {}
        for token, token_id in vocabulary.items():
            token_bytes[token_id] = bytes_of(token)
        if first_bytes_of is not bytes_of:
            for token, token_id in vocabulary.items():
                first = first_bytes_of(token)
                if first != token_bytes[token_id]:
                    first_bytes[token_id] = first
        return cls(token_bytes, first_bytes, checkpoint.special_ids)

    def __len__(self) -> int:
        """One more than the largest id."""
        return len(self._all)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids skipped by `skip_special_tokens`."""
        return self._special_ids

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse negative ids; unknown ids are allowed and produce no text.

        Raises:
            InvalidRequestError: an id is negative.
        """
        if token_ids and min(token_ids) < 0:
            raise InvalidRequestError(f"token id {min(token_ids)}: expected a number ≥ 0")

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """The token's bytes inside a text; empty if it is skipped or unknown."""
        if not 0 <= token_id < len(self._all):
            return b""
        return (self._without_special if skip_special_tokens else self._all)[token_id]

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes of a visible token that no visible token precedes."""
        return self._first[token_id] if token_id in self._first else self._all[token_id]


def _parse_decoder(decoder: dict[str, Any] | None) -> tuple[BytesOf, BytesOf]:
    """Return two functions: a token's bytes inside a text, and at its start."""
    if decoder is None:
        raise ModelError("tokenizer.json has no decoder: ByteLevel, Metaspace or a Sequence is supported")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = [step["type"] for step in steps if step["type"] != "Fuse"]
    if types == ["ByteLevel"]:
        return _byte_level_bytes, _byte_level_bytes
    sentence_piece = _SentencePiece()
    for index, step in enumerate(steps):
        if step["type"] != "Fuse":
            is_fused = any(earlier["type"] == "Fuse" for earlier in steps[:index])
            sentence_piece = sentence_piece.with_step(step, is_fused)
    return sentence_piece.bytes_of, sentence_piece.first_bytes_of


@dataclass(frozen=True, slots=True)
class _SentencePiece:
    """Decoder steps of the SentencePiece kind, in the order in which they apply.

    Attributes:
        replacements: (old, new) in every token.
        has_bytes: whether a token "<0x..>" is one byte.
        removed_at_start: removed from a text's first token, before the replacements.
        stripped_at_start: removed once from the beginning of a text.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    has_bytes: bool = False
    removed_at_start: str = ""
    stripped_at_start: str = ""

    def with_step(self, step: dict[str, Any], is_fused: bool) -> _SentencePiece:
        """Return these steps with one more.

        Raises:
            ModelError: the step is not supported, or not at this point of the sequence.
        """
        kind = step["type"]
        if kind == "Strip" and is_fused and (step["start"], step["stop"]) == (1, 0):
            return replace(self, stripped_at_start=step["content"])
        if kind == "Replace" and not is_fused and "String" in step["pattern"]:
            return replace(
                self, replacements=(*self.replacements, (step["pattern"]["String"], step["content"]))
            )
        if kind == "Metaspace" and not is_fused:
            is_removed = step.get("prepend_scheme", "always") != "never"
            return replace(
                self,
                replacements=(*self.replacements, (step["replacement"], " ")),
                removed_at_start=step["replacement"] if is_removed else "",
            )
        if kind == "ByteFallback" and not is_fused:
            return replace(self, has_bytes=True)
        raise ModelError(f"tokenizer.json: the decoder {kind!r} is not supported with these settings")

    def bytes_of(self, token: str) -> bytes:
        """The token's bytes inside a text."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self.has_bytes else None
        return bytes([int(match[1], 16)]) if match else token.encode()

    def first_bytes_of(self, token: str) -> bytes:
        """The token's bytes at a text's start."""
        if self.removed_at_start:
            token = token.replace(self.removed_at_start, "")
        return self.bytes_of(token).removeprefix(self.stripped_at_start.encode())


class _Alphabet(dict[int, int]):
    """The byte that each character of a byte-level vocabulary represents, for `str.translate`.

    GPT-2 defined it: printable bytes represent themselves, and U+0100 and following, in order, the others.
    """

    _NO_BYTE = 0x100

    def __init__(self) -> None:
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        super().__init__({byte: byte for byte in printable})
        self.update({0x100 + index: byte for index, byte in enumerate(others)})

    def __missing__(self, char: int) -> int:
        return self._NO_BYTE


_ALPHABET = _Alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """The token's bytes; a token with any other character is plain text (an added token)."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
