"""The reference's fields that say how long KV blocks are kept for reuse."""

from __future__ import annotations

import math
from collections.abc import Mapping

from naiad.errors import InvalidRequestError
from naiad.sequence import DEFAULT_KV_PRIORITY, KVRetention
from naiad.triton_server.request_fields import INT32_MAX, Array
from naiad.triton_server.request_limits import MAX_RETENTION_RANGES

_RANGE = "retention_token_range_"
_STARTS, _ENDS, _PRIORITIES = (f"{_RANGE}{name}" for name in ("starts", "ends", "priorities"))
_DURATIONS = f"{_RANGE}durations_ms"
_DECODE_PRIORITY, _DECODE_DURATION = "retention_decode_priority", "retention_decode_duration_ms"
_MAX_PRIORITY = 100
# The reference's "none": a range without an end, a priority without one.
_NONE = -1


def read_retention(tensors: Mapping[str, Array]) -> KVRetention | None:
    """What one row asks for; None: nothing.

    Raises:
        InvalidRequestError: names the field, its value and what is allowed.
    """
    values = {
        name: [int(each) for each in tensors[name].reshape(-1).tolist()]
        for name in (_STARTS, _ENDS, _PRIORITIES, _DURATIONS, _DECODE_PRIORITY, _DECODE_DURATION)
        if name in tensors and tensors[name].size
    }
    if not values:
        return None
    ranges = _read_ranges(values)
    decode_priority = _only(values, _DECODE_PRIORITY, DEFAULT_KV_PRIORITY)
    _check(_DECODE_PRIORITY, decode_priority, 0, _MAX_PRIORITY)
    duration_s = _seconds(_DECODE_DURATION, _only(values, _DECODE_DURATION, _NONE))
    return KVRetention(ranges=ranges, decode_priority=decode_priority, decode_duration_s=duration_s)


def _read_ranges(values: Mapping[str, list[int]]) -> tuple[tuple[int, int, int, float], ...]:
    starts = values.get(_STARTS, [])
    if len(starts) > MAX_RETENTION_RANGES:
        raise InvalidRequestError(
            f"{_STARTS} has {len(starts)} values: at most {MAX_RETENTION_RANGES} are allowed"
        )
    for name in (_ENDS, _PRIORITIES, _DURATIONS):
        is_left_out = name == _DURATIONS and name not in values
        if not is_left_out and len(values.get(name, [])) != len(starts):
            raise InvalidRequestError(
                f"{name} has {len(values.get(name, []))} values: expected {len(starts)}, as {_STARTS} has"
            )
    ranges = []
    durations = values.get(_DURATIONS, [_NONE] * len(starts))
    for start, end, priority, duration_ms in zip(
        starts, values.get(_ENDS, []), values.get(_PRIORITIES, []), durations, strict=True
    ):
        _check(_STARTS, start, 0, INT32_MAX)
        if end != _NONE:
            _check(_ENDS, end, start + 1, INT32_MAX)
        _check(_PRIORITIES, priority, 0, _MAX_PRIORITY)
        behind = INT32_MAX if end == _NONE else end
        ranges.append((start, behind, priority, _seconds(_DURATIONS, duration_ms)))
    return tuple(ranges)


def _only(values: Mapping[str, list[int]], name: str, default: int) -> int:
    sent = values.get(name, [default])
    if len(sent) != 1:
        raise InvalidRequestError(f"{name} has {len(sent)} values a row: expected one")
    return sent[0]


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(f"{name} holds {value}: expected {least} … {most}")


def _seconds(name: str, duration_ms: int) -> float:
    """Infinity where there is none."""
    if duration_ms == _NONE:
        return math.inf
    _check(name, duration_ms, 0, INT32_MAX)
    return duration_ms / 1000
