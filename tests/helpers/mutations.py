"""Bytes made from other bytes, as damaged or hostile ones would be."""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUMBERS = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\xff" * 8,
    b"-1",
    b"1e999",
    b"99999999999999999999",
)
_SIGNS = (b'"', b"{", b"[", b"]", b"}", b",", b":", b"\\u0000", b"\\ud800", b"null", b"\r\n", b"{{", b"%}")


def mutated(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """Make one to four changes.

    Args:
        data: the bytes to change.
        draw: where the changes come from.
        others: bytes of which a piece may be taken.
    """
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        begin = draw.randint(0, len(made))
        end = min(len(made), begin + draw.choice((0, 1, 1, 2, 4, 8, 64)))
        kind = draw.randrange(6)
        if kind == 0:
            del made[begin:end]
        elif kind == 1:
            made[begin:end] = draw.choice(_NUMBERS)
        elif kind == 2:
            made[begin:end] = draw.choice(_SIGNS)
        elif kind == 3 and begin < len(made):
            made[begin] ^= 1 << draw.randrange(8)
        elif kind == 4:
            made[begin:begin] = bytes(made[begin:end]) * draw.randint(1, 8)
        else:
            other = draw.choice(others)
            place = draw.randint(0, len(other))
            made[begin:end] = other[place : place + draw.choice((1, 4, 16, 256))]
    return bytes(made)
