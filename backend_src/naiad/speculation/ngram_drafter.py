"""Prompt lookup: the tokens that followed the last few tokens earlier may follow them again.

The idea is prompt lookup decoding (Saxena, 2023). Here an index that grows with the text finds the
earlier occurrences, instead of a scan.
"""

from __future__ import annotations

from naiad.errors import ConfigError
from naiad.sequence import Sequence
from naiad.speculation.drafter import MAX_READ_TOKENS, TextDrafter

_TOKEN_BITS = 32


class NGramDrafter(TextDrafter):
    """Drafts by copying from the sequence's own prompt and output.

    It finds the longest n-gram, of a few sizes, that ends the text and occurred before, and copies what
    followed its latest occurrence. The copy may continue into itself, so a repeated line continues for
    as many tokens as requested.
    """

    def __init__(self, sizes: tuple[int, ...] = (5, 4, 3, 2)) -> None:
        """Start without sequences.

        Args:
            sizes: n-gram sizes in tokens, each ≥ 1, descending. Each size costs about 100 bytes per
                token of a sequence.

        Raises:
            ConfigError: the sizes are below 1 or not descending.
        """
        if not sizes or sizes[-1] < 1 or list(sizes) != sorted(set(sizes), reverse=True):
            raise ConfigError("sizes", sizes, "n-gram sizes, each at least 1, in descending order")
        self._sizes = sizes
        self._indexes: dict[int, _NGramIndex] = {}

    def guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Implements `TextDrafter.guess` in O(number of sizes) per token that is new since the last call."""
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
        """Implements `TextDrafter.num_read`."""
        index = self._indexes.get(sequence.sequence_id)
        return 0 if index is None else index.num_tokens

    def forget(self, sequence: Sequence) -> None:
        """Implements `Drafter.forget`."""
        self._indexes.pop(sequence.sequence_id, None)


class _NGramIndex:
    """Finds where the n-grams of one text continued last.

    Attributes:
        num_tokens: tokens of the text that have been read.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.num_tokens = 0
        # The last tokens are the digits of one number, so equal numbers are equal n-grams.
        self._tail = 0
        self._tail_mask = _mask(sizes[0])
        self._tables: list[tuple[int, int, dict[int, int]]] = [(size, _mask(size), {}) for size in sizes]

    def read(self, token_ids: list[int]) -> bool:
        """Index new tokens: n-grams with the token that follows them. Returns whether all were read."""
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
        """Return the place after the latest earlier occurrence of the longest n-gram that ends the text."""
        for _, mask, table in self._tables:
            place = table.get(self._tail & mask)
            if place is not None:
                return place
        return None


def _mask(size: int) -> int:
    return (1 << _TOKEN_BITS * size) - 1
