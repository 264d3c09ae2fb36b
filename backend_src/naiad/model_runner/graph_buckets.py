"""The step sizes that are captured as graphs; a step is padded to the next larger size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# With more tokens, computing takes a GPU longer than launching takes the host.
_MAX_TOKENS = 512
# A graph launches a program for each part of the longest context that it allows, even for short contexts.
_SHORT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Bucket:
    """A captured size: an upper bound of a step.

    Attributes:
        num_seqs: number of sequences.
        query_len: tokens of one sequence in the step.
        max_seq_len: cached tokens of one sequence, including those of the step.
    """

    num_seqs: int
    query_len: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return self.num_seqs * self.query_len


@dataclass(frozen=True, slots=True)
class Buckets:
    """All captured sizes: every combination of the lists below with few enough tokens.

    Attributes:
        nums_seqs, query_lens, max_seq_lens: ascending.
    """

    nums_seqs: Sequence[int]
    query_lens: Sequence[int]
    max_seq_lens: Sequence[int]

    @classmethod
    def of(cls, max_num_seqs: int, max_query_len: int, max_model_len: int) -> Buckets:
        """Choose the sizes for an engine.

        Args:
            max_num_seqs: maximum sequences of a step.
            max_query_len: maximum tokens of a sequence in a step: one and its drafts.
            max_model_len: maximum tokens of a sequence.
        """
        most = min(max_num_seqs, _MAX_TOKENS)
        # 1, 2, 3, 4, 6, 8, 12, …: no step is padded to twice its size.
        sizes = sorted({num << shift for shift in range(10) for num in (2, 3)} | {1})
        return cls(
            nums_seqs=[size for size in sizes if size < most] + [most],
            query_lens=sorted({1, max_query_len}),
            max_seq_lens=sorted({min(_SHORT_CONTEXT, max_model_len), max_model_len}),
        )

    def all(self) -> list[Bucket]:
        """Return all sizes, largest first, so that smaller ones reuse its memory."""
        buckets = [
            Bucket(num_seqs, query_len, max_seq_len)
            for max_seq_len in self.max_seq_lens
            for query_len in self.query_lens
            for num_seqs in self.nums_seqs
            if num_seqs * query_len <= _MAX_TOKENS
        ]
        return sorted(buckets, key=lambda each: (each.num_tokens, each.max_seq_len), reverse=True)

    def smallest(self, num_seqs: int, query_len: int, max_seq_len: int) -> Bucket | None:
        """Return the smallest size that a step fits, or None if it is too large."""
        bounds = [
            _first_from(self.nums_seqs, num_seqs),
            _first_from(self.query_lens, query_len),
            _first_from(self.max_seq_lens, max_seq_len),
        ]
        if 0 in bounds:
            return None
        bucket = Bucket(*bounds)
        return bucket if bucket.num_tokens <= _MAX_TOKENS else None


def _first_from(ascending: Sequence[int], number: int) -> int:
    """Return the first number that is at least `number`; 0: there is none."""
    index = bisect_left(ascending, number)
    return ascending[index] if index < len(ascending) else 0
