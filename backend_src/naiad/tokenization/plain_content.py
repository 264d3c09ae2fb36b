"""Prevents the content of messages from becoming special tokens.

A chat template mixes its own control tokens with users' content, and may trim, cut or join the
content. So the content is not separated from the rendered text but marked inside it. Wherever the
content holds the text of a special token, or may begin one at its end, a character that no text
contains is inserted after the first character. So the rendered text has no special tokens except the
template's own. A copy of the tokenizer, whose normalizer removes the mark, encodes it: it looks for
special tokens before it normalizes, and otherwise equals the checkpoint's tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import tokenizers

from naiad.errors import InvalidRequestError
from naiad.tokenization.checkpoint_tokenizer import CheckpointTokenizer, encode_text
from naiad.tokenization.nesting import MAX_LEVELS, is_too_deep

# A noncharacter of Unicode: reserved for use inside a program.
_MARK = "\ufdd0"
# Keys by which templates may find their way, such as "name", "type" and "$defs".
_PLAIN_KEY = re.compile(r"[\w.$-]*")
_NUM_SOUGHT_CHARS = 4


class PlainContent:
    """Marks content, and encodes text that contains marks."""

    def __init__(self, checkpoint: CheckpointTokenizer) -> None:
        """Collect the texts of the special tokens."""
        added = checkpoint.tokenizer.get_added_tokens_decoder()
        self._tokenizer = checkpoint.tokenizer
        self._special_texts = [token.content for token in added.values() if token.special]
        self._beginnings = {text[:length] for text in self._special_texts for length in range(1, len(text))}
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        # Few, as special tokens begin alike. A regex of all of them would be slow on text full of beginnings.
        sought = {re.escape(text[:_NUM_SOUGHT_CHARS]) for text in self._special_texts}
        self._may_be_special = re.compile("|".join(sorted(sought)) or "(?!)")
        unknown_token = getattr(checkpoint.tokenizer.model, "unk_token", None)
        unknown_ids = {checkpoint.named_token_id("unk_token")}
        if unknown_token is not None:
            unknown_ids.add(checkpoint.tokenizer.token_to_id(unknown_token))
        self._control_ids = checkpoint.special_ids - unknown_ids

    def mark(self, content: str) -> str:
        """Return the content with marks wherever it could form a special token.

        Raises:
            InvalidRequestError: the content cannot be kept plain.
        """
        if _MARK in content:
            raise InvalidRequestError("messages: the character U+FDD0 is not allowed in content")
        places = sorted(set(self._occurrences(content)) | set(self._open_ends(content)))
        if not places:
            return content
        edges = [0, *(place + 1 for place in places), len(content)]
        return _MARK.join(content[start:end] for start, end in pairwise(edges))

    def mark_all(self, value: Any, field: str) -> Any:
        """Return a JSON value all of whose texts are marked.

        In keys by which templates find their way only a whole special token is marked, not an open end.

        Args:
            value: the value.
            field: the field that holds it, for errors.

        Raises:
            InvalidRequestError: a text cannot be kept plain, or the value is nested too deep.
        """
        if is_too_deep(value):
            raise InvalidRequestError(f"{field}: nested too deep: expected at most {MAX_LEVELS} levels")
        return self._marked(value)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a rendered text without its marks.

        Args:
            text: the text, in which contents are marked.
            add_special_tokens: add those that the checkpoint adds to any text.

        Raises:
            InvalidRequestError: content would still become a special token (in a vocabulary where
                a special token is also an ordinary piece).
        """
        marked_ids = encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if _MARK not in text:
            return marked_ids
        ids = encode_text(self._unmarking_tokenizer, text, add_special_tokens=add_special_tokens)
        if self._count_controls(ids) != self._count_controls(marked_ids):
            raise InvalidRequestError("messages: content holds the text of a special token")
        return ids

    def _marked(self, value: Any) -> Any:
        match value:
            case str():
                return self.mark(value)
            case list():
                return [self._marked(each) for each in value]
            case dict():
                return {self._marked_key(key): self._marked(each) for key, each in value.items()}
        return value

    def _marked_key(self, key: str) -> str:
        is_plain = _PLAIN_KEY.fullmatch(key) and next(self._occurrences(key), None) is None
        return key if is_plain else self.mark(key)

    def _occurrences(self, content: str) -> Iterator[int]:
        """Find where special tokens begin in the content."""
        if not self._may_be_special.search(content):
            return
        for text in self._special_texts:
            place = content.find(text)
            if place >= 0 and len(text) == 1:
                raise InvalidRequestError(f"messages: the special token {text!r} is not allowed in content")
            while place >= 0:
                yield place
                place = content.find(text, place + 1)

    def _open_ends(self, content: str) -> Iterator[int]:
        """Find where the end of the content may begin a special token that the following text completes."""
        end = len(content.rstrip())
        for start in range(max(0, end - self._longest_beginning), end):
            if content[start:end] in self._beginnings:
                yield start

    def _count_controls(self, ids: list[int]) -> int:
        return sum(token_id in self._control_ids for token_id in ids)

    @cached_property
    def _unmarking_tokenizer(self) -> tokenizers.Tokenizer:
        """A tokenizer that removes marks, built on first use because reading a vocabulary takes a while."""
        definition = json.loads(self._tokenizer.to_str())
        remove = {"type": "Replace", "pattern": {"String": _MARK}, "content": ""}
        original = definition.get("normalizer")
        definition["normalizer"] = {
            "type": "Sequence",
            "normalizers": [remove] if original is None else [remove, original],
        }
        for token in definition["added_tokens"]:
            if token["special"]:
                # Otherwise the tokenizer would look for it again after the marks are removed.
                token["normalized"] = False
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
