"""Reads the regular expressions of JSON schemas as ECMA-262 does."""

from __future__ import annotations

import re
from typing import Any

# For llguidance these have all digits and letters of Unicode. Classes may stand in classes.
_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_PATTERN, _PATTERN_PROPERTIES = "pattern", "patternProperties"


def ascii_classes(pattern: str) -> str:
    r"""Write a pattern's \d and \w, which ECMA-262 limits to ASCII, as llguidance has to read them."""
    return _ESCAPE.sub(lambda found: _CLASSES.get(found.group(), found.group()), pattern)


def rewrite_patterns(schema: dict[str, Any]) -> bool:
    """Do so in a schema, without those in it; return whether it has changed.

    Raises:
        ValueError: two patterns of `patternProperties` are the same then.
    """
    pattern, properties = schema.get(_PATTERN), schema.get(_PATTERN_PROPERTIES)
    has_changed = False
    if isinstance(pattern, str):
        schema[_PATTERN] = ascii_classes(pattern)
        has_changed = schema[_PATTERN] != pattern
    if isinstance(properties, dict):
        written = {ascii_classes(key): value for key, value in properties.items()}
        if len(written) < len(properties):
            raise ValueError(f"{_PATTERN_PROPERTIES} has two patterns that are the same")
        schema[_PATTERN_PROPERTIES] = written
        has_changed |= list(schema[_PATTERN_PROPERTIES]) != list(properties)
    return has_changed
