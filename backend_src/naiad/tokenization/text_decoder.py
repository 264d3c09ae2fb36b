"""Decodes token ids to text in pieces, which add up to the same text however the ids are divided.

Text is the UTF-8 decoding of the tokens' concatenated bytes. A character whose bytes are
incomplete is held back; a byte that cannot be part of a character becomes one U+FFFD.
So the text that ids add depends on earlier ids only through (a) a character that is
still open and (b) whether any text precedes them at all (a SentencePiece text loses the
space before its first word). `context_ids` keeps the few earlier ids that decide both.

`tokenizers` decodes to the same text, with one exception: it turns a whole run of byte-fallback
tokens with an invalid byte into U+FFFD, which would take back characters already streamed.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from naiad.errors import InvalidRequestError
from naiad.tokenization.token_table import TokenTable

_MAX_CONTINUATION_BYTES = 3


class TextDecoder:
    """Decodes one sequence of ids, id by id."""

    __slots__ = ("_at_start", "_open_bytes", "_skip_special_tokens", "_table")

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        """Start before the first id."""
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._open_bytes = b""
        self._at_start = True

    @property
    def has_open_character(self) -> bool:
        """Whether the last character is incomplete."""
        return bool(self._open_bytes)

    def push(self, token_id: int) -> str:
        """Return the characters that this id completes."""
        return self._decode(self._bytes(token_id))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Return the characters that these ids complete."""
        return self._decode(b"".join([self._bytes(token_id) for token_id in token_ids]))

    def flush(self) -> str:
        """Return what is held back: U+FFFD for a character that was never completed, or nothing."""
        return self._decode(b"", is_last=True)

    def _decode(self, data: bytes, is_last: bool = False) -> str:
        data = self._open_bytes + data
        text, num_decoded = utf_8_decode(data, "replace", is_last)
        self._open_bytes = data[num_decoded:]
        return text

    def _bytes(self, token_id: int) -> bytes:
        data = self._table.visible_bytes(token_id, self._skip_special_tokens)
        if data and self._at_start:
            self._at_start = False
            return self._table.first_bytes(token_id)
        return data


def context_ids(table: TokenTable, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """Return the last ids of `token_ids` on which the text of any following ids depends.

    These are the last visible ids, back to one with a byte that is not a continuation byte, which
    completes every earlier character, or back to three continuation bytes in a row, after which no
    character is open. At most three ids; never empty if any id is visible.

    `context_ids(context_ids(a) + b) == context_ids(a + b)`, so it can be carried along.
    """
    found: list[int] = []
    num_continuation_bytes = 0
    for token_id in reversed(token_ids):
        data = table.visible_bytes(token_id, skip_special_tokens)
        if not data:
            continue
        found.append(token_id)
        num_continuation_bytes += len(data)
        if num_continuation_bytes >= _MAX_CONTINUATION_BYTES or any(byte & 0xC0 != 0x80 for byte in data):
            break
    found.reverse()
    return found


def decode_after(
    table: TokenTable,
    before_ids: Iterable[int],
    new_ids: Iterable[int],
    *,
    is_last: bool,
    skip_special_tokens: bool,
) -> str:
    """Return the text that `new_ids` add to that of `before_ids`; the ids must not be negative.

    Args:
        table: the checkpoint's tokens.
        before_ids: ids that have been decoded already (`context_ids` of all of them is enough).
        new_ids: the ids that follow.
        is_last: also return what is held back at their end.
        skip_special_tokens: whether special tokens produce no text.
    """
    decoder = TextDecoder(table, skip_special_tokens)
    decoder.push_all(before_ids)
    text = decoder.push_all(new_ids)
    return text + decoder.flush() if is_last else text


def decode_chunk(
    table: TokenTable,
    window_ids: Sequence[int],
    num_emitted: int,
    max_chars: int,
    is_last: bool,
    skip_special_tokens: bool,
) -> str:
    """Return the text that `window_ids[num_emitted:]` add to that of `window_ids[:num_emitted]`.

    Args:
        table: the checkpoint's tokens.
        window_ids: ids that have been decoded already (`context_ids` of all of them is enough), followed
            by the new ones.
        num_emitted: number of ids of the window that have been decoded already.
        max_chars: maximum length of the new text in characters; −1 = no limit.
        is_last: also return what is held back at the window's end.
        skip_special_tokens: whether special tokens produce no text.

    Raises:
        InvalidRequestError: an id is negative, or `num_emitted` or `max_chars` out of range.
    """
    if not 0 <= num_emitted <= len(window_ids):
        raise InvalidRequestError(
            f"num_emitted_tokens = {num_emitted}: expected 0 … {len(window_ids)}, the length of window_ids"
        )
    if max_chars < -1:
        raise InvalidRequestError(f"max_chars = {max_chars}: expected -1 (all) or a number of characters")
    table.check_ids(window_ids)
    before, new = window_ids[:num_emitted], window_ids[num_emitted:]
    text = decode_after(table, before, new, is_last=is_last, skip_special_tokens=skip_special_tokens)
    return text if max_chars < 0 else text[:max_chars]


def decode(table: TokenTable, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the whole text of `token_ids`.

    Raises:
        InvalidRequestError: an id is negative.
    """
    return decode_chunk(table, token_ids, 0, -1, True, skip_special_tokens)
