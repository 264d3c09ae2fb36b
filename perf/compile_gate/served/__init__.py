"""The launches of serving on each of `SHAPES`, by the names in `OPS`."""

from __future__ import annotations

from collections.abc import Callable

from perf.compile_gate.served.adapters import adapters
from perf.compile_gate.served.fixed_order import fixed_order
from perf.compile_gate.served.layer import attention, attention_launch, cache_ops, small_ops
from perf.compile_gate.served.quantised import (
    quantised_launch,
    quantised_token,
    quantised_tokens,
)
from perf.compile_gate.served.sampling import sampling
from perf.compile_gate.served.shapes import OPS, SHAPES, ServedShape

__all__ = ["OPS", "SHAPES", "ServedShape", "attention_launch", "launches", "quantised_launch"]


def launches(shape: ServedShape, op: str) -> Callable[[], object]:
    """All launches of one of `OPS` on a layer of this shape."""
    by_op = {
        "small ops": small_ops,
        "cache": cache_ops,
        "attention": attention,
        "sampling": sampling,
        "adapters": adapters,
        "fixed order": fixed_order,
        "quantised, one token": quantised_token,
        "quantised, many tokens": quantised_tokens,
    }
    return by_op[op](shape)
