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
