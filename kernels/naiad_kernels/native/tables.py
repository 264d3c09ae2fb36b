"""A step's block tables as the native kernels read them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NativeTables:
    """One group's block tables in a step, and where each sequence's tokens begin.

    Attributes:
        query_starts: int32 `[num_seqs + 1]`, of the step's tokens.
        blocks: int32 `[num_seqs, stride]`; −1 after a sequence's last block.
        stride: of `blocks`.
    """

    query_starts: array[int]
    blocks: array[int]
    stride: int

    @classmethod
    def of(cls, query_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> NativeTables:
        """Lay a step's block tables out.

        Args:
            query_lens: tokens of each sequence in this step.
            block_tables: each sequence's block ids.
        """
        stride = max(map(len, block_tables))
        blocks = array("i")
        for table in block_tables:
            blocks.extend(table)
            blocks.extend([-1] * (stride - len(table)))
        starts = array("i", [0])
        for length in query_lens:
            starts.append(starts[-1] + length)
        return cls(starts, blocks, stride)

    def check(self, group: int, first: NativeTables, num_tokens: int) -> None:
        """See that native code, which reads as many sequences as the first group has, finds them all.

        Args:
            group: whose tables these are.
            first: the first group's, perhaps these; they have been checked.
            num_tokens: of the step.

        Raises:
            ValueError: an array is too short or too long, has numbers of another type, or tells of other
                sequences than the first group's.
        """
        num_seqs = len(first.query_starts) - 1
        is_read_whole = (
            self.query_starts.typecode == self.blocks.typecode == "i"
            and 1 <= num_seqs <= num_tokens
            and len(self.blocks) == num_seqs * self.stride
            and (self is first or self.query_starts == first.query_starts)
        )
        if not is_read_whole:
            raise ValueError(f"tables[{group}].{self._problem(first, num_tokens)}")

    def _problem(self, first: NativeTables, num_tokens: int) -> str:
        starts, num_seqs = self.query_starts, len(first.query_starts) - 1
        for field, numbers in (("query_starts", starts), ("blocks", self.blocks)):
            if numbers.typecode != "i":
                return f"{field} has numbers of type {numbers.typecode!r}; allowed: 'i'"
        if not 1 <= num_seqs <= num_tokens:
            return f"query_starts has {len(starts)} numbers; allowed: from 2 to {num_tokens + 1}"
        if starts != first.query_starts:
            return (
                f"query_starts is {starts.tolist()}; allowed: {first.query_starts.tolist()}, as of tables[0]"
            )
        allowed = f"{num_seqs * self.stride}, {self.stride} for each of {num_seqs} sequences"
        return f"blocks has {len(self.blocks)} numbers; allowed: {allowed}"
