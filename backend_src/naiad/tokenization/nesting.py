"""How deep the JSON of requests may be nested: what is deeper could not be walked through without a fault."""

from __future__ import annotations

from typing import Any

MAX_LEVELS = 128


def is_too_deep(value: Any) -> bool:
    """Whether a JSON value has more than `MAX_LEVELS` levels of lists and objects."""
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return False
        level = [
            inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return True
