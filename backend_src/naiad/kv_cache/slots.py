"""Slot numbers of the KV cache: a token's slot is block × block_size + offset."""

from __future__ import annotations

from collections.abc import Sequence


def slots_of(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """The slots of a sequence's tokens at the positions [start, end)."""
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, end)
    ]
