"""The kernels' performance targets on a GPU, and whether they are met."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure of a row.

    Attributes:
        figure: the figure's name.
        bound: the minimum.
        is_most: the bound is a maximum instead.
    """

    figure: str
    bound: float
    is_most: bool = False


TARGETS = {
    # For 32 sequences or more with 2,048 cached tokens or more.
    "decode": Target("of_copy", 0.85),
    "decode of an 8-bit cache": Target("of_copy", 0.75),
    # For 8,192 tokens.
    "prefill": Target("tflops_per_s", 450.0),
    # For 2,048 tokens or more.
    "element-wise": Target("of_copy", 0.85),
    # For one token.
    "four-bit weights": Target("of_copy", 0.70),
    "FP8 product": Target("of_cublas", 1.0),
    "sampler": Target("logits_passes", 3.0, is_most=True),
}


def verdict(name: str, row: Mapping[str, float | str | None]) -> str:
    """State whether the row meets its target, and the bound; "" without a target."""
    if not name:
        return ""
    target = TARGETS[name]
    value = row[target.figure]
    if not isinstance(value, float):
        return f"not measured: {target.figure}"
    compare = operator.le if target.is_most else operator.ge
    sign = "≤" if target.is_most else "≥"
    word = "met" if compare(value, target.bound) else "missed"
    return f"{word}: {target.figure} {sign} {target.bound:g}"
