"""Where the tokens of a choice begin in its text."""

from __future__ import annotations

from collections.abc import Sequence

from naiad.tokenization import TextDecoder, TokenTable


class TextOffsets:
    """Counts the characters before each new token; a part of a character begins where that character does."""

    def __init__(
        self, table: TokenTable, tail_ids: Sequence[int], *, skip_special_tokens: bool, start: int
    ) -> None:
        """Begin after the prompt.

        Args:
            table: the checkpoint's tokens.
            tail_ids: the last ids of the prompt, as in `TextContext`.
            skip_special_tokens: special tokens are left out of the text.
            start: number of characters of the choice's text before the first new token.
        """
        self._table = table
        self._skips = skip_special_tokens
        self._decoder = TextDecoder(table, skip_special_tokens)
        self._decoder.push_all(tail_ids)
        self._place = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the place of each of the next tokens."""
        places = []
        for token_id in token_ids:
            data = self._table.visible_bytes(token_id, self._skips)
            places.append(self._place + _closes_character(self._decoder, data))
            self._place += len(self._decoder.push(token_id))
        return places


def prompt_offsets(table: TokenTable, token_ids: Sequence[int], text: str) -> list[int]:
    """Return where each token of a prompt begins in its text.

    Args:
        table: the checkpoint's tokens.
        token_ids: the prompt's ids; special tokens need not be in the text.
        text: the prompt's text, which need not be what the ids decode to.
    """
    decoder = TextDecoder(table, skip_special_tokens=False)
    place = 0
    places = []
    for token_id in token_ids:
        data = table.visible_bytes(token_id, skip_special_tokens=False)
        places.append(min(place + _closes_character(decoder, data), len(text)))
        if token_id in table.special_ids and not text.startswith(data.decode(errors="replace"), places[-1]):
            continue
        piece = decoder.push(token_id)
        if piece[:1] == " " and not text.startswith(piece, place) and text.startswith(piece[1:], place):
            # A tokenizer may put a space before the text's first word.
            piece = piece[1:]
        place += len(piece)
    return places


def _closes_character(decoder: TextDecoder, data: bytes) -> bool:
    """Whether a token of these bytes ends an incomplete character, as it does not continue it."""
    return decoder.has_open_character and data[:1] != b"" and data[0] & 0xC0 != 0x80
