from __future__ import annotations

import math
from typing import Any

import pytest

from naiad.errors import InvalidRequestError
from naiad.frontend.request import read_retention
from naiad.sequence import KVRetention

RANGES = {"starts": [0, 64], "ends": [64, -1], "priorities": [100, 0], "durations_ms": [1500, -1]}


def sent(decode: dict[str, int] | None = None, **ranges: list[int]) -> dict[str, Any]:
    made = {f"retention_token_range_{name}": values for name, values in ranges.items()}
    return made | {f"retention_decode_{name}": value for name, value in (decode or {}).items()}


def test_ranges_and_output() -> None:
    made = read_retention(sent({"priority": 50, "duration_ms": 20}, **RANGES))
    assert made == KVRetention(
        ranges=((0, 64, 100, 1.5), (64, 2**31 - 1, 0, math.inf)), decode_priority=50, decode_duration_s=0.02
    )
    assert read_retention(sent({"priority": 50})) == KVRetention(decode_priority=50)


def test_durations_may_be_left_out() -> None:
    made = read_retention(sent(starts=[0], ends=[5], priorities=[1]))
    assert made == KVRetention(ranges=((0, 5, 1, math.inf),))


def test_nothing_is_asked() -> None:
    assert read_retention({"max_tokens": 4}) is None
    assert read_retention(sent(starts=[], ends=[], priorities=[])) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ends": [64]}, "retention_token_range_ends has 1 values: expected 2"),
        ({"priorities": []}, "retention_token_range_priorities has 0 values: expected 2"),
        ({"durations_ms": [1]}, "retention_token_range_durations_ms has 1 values: expected 2"),
        ({"starts": [-1, 64]}, "retention_token_range_starts holds -1: expected 0"),
        ({"ends": [0, -1]}, "retention_token_range_ends holds 0: expected 1"),
        ({"ends": [64, -2]}, "retention_token_range_ends holds -2"),
        ({"priorities": [101, 0]}, "retention_token_range_priorities holds 101: expected 0 … 100"),
        ({"durations_ms": [-5, 1]}, "retention_token_range_durations_ms holds -5"),
        ({"starts": [0] * 65}, "retention_token_range_starts has 65 values: at most 64"),
    ],
)
def test_inconsistent_ranges_are_refused(changed: dict[str, list[int]], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_retention(sent(**(RANGES | changed)))


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        ({"priority": -1}, "retention_decode_priority holds -1: expected 0 … 100"),
        ({"priority": 5, "duration_ms": -2}, "retention_decode_duration_ms holds -2"),
    ],
)
def test_bad_values_for_output_are_refused(decode: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_retention(sent(decode))
