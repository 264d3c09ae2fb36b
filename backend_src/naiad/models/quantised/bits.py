"""Whole numbers packed in words of 32 bits, the lowest bits first."""

from __future__ import annotations

import torch

WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """How many words hold so many numbers without gaps."""
    return -(-count * bits // WORD_BITS)


def num_padded_words(count: int, bits: int) -> int:
    """How many words hold so many numbers if none crosses a word's border."""
    return -(-count // (WORD_BITS // bits))


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack numbers without gaps: number i has the bits from i · bits on.

    Args:
        words: `[rows, num_words]`, int32.
        bits: of a number, 1 … 8.
        count: numbers of a row.

    Returns:
        `[rows, count]`, uint8.
    """
    if WORD_BITS % bits == 0:
        return _unpack_bytes(words, bits, count)
    start = torch.arange(count) * bits
    index, shift = start // WORD_BITS, start % WORD_BITS
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    next_index = (index + 1).clamp_max(words.shape[1] - 1)
    pair = unsigned[:, index] | unsigned[:, next_index] << WORD_BITS
    return (pair >> shift & (1 << bits) - 1).to(torch.uint8)


def unpack_padded(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack numbers none of which crosses a word's border; the rest of each word is unused.

    Args and result are those of `unpack`.
    """
    shifts = torch.arange(WORD_BITS // bits) * bits
    numbers = words[:, :, None].to(torch.int64) >> shifts & (1 << bits) - 1
    return numbers.flatten(1)[:, :count].to(torch.uint8)


def _unpack_bytes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack numbers that lie within bytes: a word's bytes are in little-endian order."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :count]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    numbers = octets[:, :, None] >> shifts & (1 << bits) - 1
    return numbers.flatten(1)[:, :count]
