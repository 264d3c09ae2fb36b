"""Prompt lookup: what followed the last few tokens before will follow them again.

The idea is prompt lookup decoding (Saxena, 2023); here the earlier places are found by an index
that grows with the text instead of by a scan.
"""

from __future__ import annotations

from naiad.errors import ConfigError
from naiad.sequence import Sequence
from naiad.speculation.drafter import MAX_READ_TOKENS, TextDrafter

_TOKEN_BITS = 32


class NGramDrafter(TextDrafter):
    """Drafts by copying from the sequence's own prompt and output.

    The longest of a few n-grams that ends the text and occurred before decides; of its occurrences
    the latest. Copying starts after it and may run on into its own copy, so a repeated line goes
    on as often as is asked for.
    """

    def __init__(self, sizes: tuple[int, ...] = (5, 4, 3, 2)) -> None:
        """Know no sequence.

        Args:
            sizes: of the n-grams, in tokens, each ≥ 1, descending. Each costs about 100 bytes a
                token of a sequence.

        Raises:
            ConfigError: the sizes are not so.
        """
        if not sizes or sizes[-1] < 1 or list(sizes) != sorted(set(sizes), reverse=True):
            raise ConfigError("sizes", sizes, "n-gram sizes, each at least 1, in descending order")
        self._sizes = sizes
        self._indexes: dict[int, _NGramIndex] = {}

    def guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """See `TextDrafter`. Costs O(number of sizes) a token that is new since the last call."""
        index = self._indexes.get(sequence.sequence_id)
        if index is None:
            index = self._indexes[sequence.sequence_id] = _NGramIndex(self._sizes)
        token_ids = sequence.token_ids
        start = index.find() if index.read(token_ids) else None
        if start is None:
            return []
        period = len(token_ids) - start
        return [token_ids[start + place % period] for place in range(num_tokens)]

    def num_read(self, sequence: Sequence) -> int:
        """See `TextDrafter`."""
        index = self._indexes.get(sequence.sequence_id)
        return 0 if index is None else index.num_tokens

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._indexes.pop(sequence.sequence_id, None)


class _NGramIndex:
    """Where the n-grams of one text went on last.

    Attributes:
        num_tokens: of the text, taken in.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.num_tokens = 0
        # The last tokens as the digits of one number: equal numbers are equal n-grams.
        self._tail = 0
        self._tail_mask = _mask(sizes[0])
        self._tables: list[tuple[int, int, dict[int, int]]] = [(size, _mask(size), {}) for size in sizes]

    def read(self, token_ids: list[int]) -> bool:
        """Take in new tokens, n-grams with the token that follows them; whether that were all."""
        assert len(token_ids) >= self.num_tokens, "known tokens never get fewer"
        tail, tail_mask = self._tail, self._tail_mask
        end = min(len(token_ids), self.num_tokens + MAX_READ_TOKENS)
        for place in range(self.num_tokens, end):
            for size, mask, table in self._tables:
                if place >= size:
                    table[tail & mask] = place
            tail = (tail << _TOKEN_BITS | token_ids[place]) & tail_mask
        self._tail = tail
        self.num_tokens = end
        return end == len(token_ids)

    def find(self) -> int | None:
        """The place after the latest earlier occurrence of the longest n-gram that ends the text."""
        for _, mask, table in self._tables:
            place = table.get(self._tail & mask)
            if place is not None:
                return place
        return None


def _mask(size: int) -> int:
    return (1 << _TOKEN_BITS * size) - 1
