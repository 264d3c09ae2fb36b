"""Which shapes of inputs pass, over HTTP and gRPC.

Release 24.10 multiplies the sizes of an input modulo 2^64. With a shape whose product overflows it writes
beyond its memory, one that numpy can not hold ends the process of the model, and a large one takes as much
memory as it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from naiad.gate.refusal import RefusedError

MAX_DIMENSIONS = 8
_MOST_BESIDE_ZERO = 1 << 31
_SHOWN = 80


def check_shapes(shapes: Iterable[tuple[Any, Any]], num_bytes: int) -> None:
    """Refuse inputs with more values than there can be.

    Args:
        shapes: name and shape of each input, as they came.
        num_bytes: size of the request; each value takes one byte at least.

    Raises:
        RefusedError: a shape does not pass.
    """
    num_values = 0
    for name, shape in shapes:
        num_values += _num_values(name, shape, num_bytes)
        if num_values > num_bytes:
            raise _refused(name, shape, f"no more values than the request has bytes ({num_bytes})")


def _num_values(name: Any, shape: Any, most: int) -> int:
    """How many values a shape has, at most `most` and one; a zero hides nothing that numpy can not hold."""
    if not isinstance(shape, list):
        raise _refused(name, shape, "a list of integers from 0")
    if len(shape) > MAX_DIMENSIONS:
        raise RefusedError(
            400,
            f"the input {str(name)[:_SHOWN]} has {len(shape)} dimensions: expected at most {MAX_DIMENSIONS}",
        )
    if not all(type(size) is int and size >= 0 for size in shape):
        raise _refused(name, shape, "a list of integers from 0")
    num_beside_zeros = math.prod(size or 1 for size in shape)
    if 0 in shape and num_beside_zeros <= _MOST_BESIDE_ZERO:
        return 0
    return min(num_beside_zeros, most + 1)


def _refused(name: Any, shape: Any, expected: str) -> RefusedError:
    return RefusedError(
        400, f"the input {str(name)[:_SHOWN]} has the shape {str(shape)[:_SHOWN]}: expected {expected}"
    )
