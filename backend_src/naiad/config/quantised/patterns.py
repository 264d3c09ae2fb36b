"""Regular expressions that a checkpoint brings along; a hostile one must not stop the start."""

from __future__ import annotations

import regex

from naiad.config.checkpoint_json import bad_value

_MAX_CHARS = 1000
# Milliseconds are plenty: names of layers are short.
_TIMEOUT_S = 1.0


def check_pattern(key: str, pattern: str) -> None:
    """Refuse what is no regular expression.

    Raises:
        ModelError: names the key.
    """
    try:
        if len(pattern) > _MAX_CHARS:
            raise ValueError("it is too long")
        regex.compile(pattern)
    except (regex.error, ValueError, OverflowError, RecursionError) as error:
        raise bad_value(key, pattern, f"a regular expression ({error})") from None


def matches(key: str, pattern: str, name: str) -> bool:
    """Whether a name begins with what the pattern describes.

    Raises:
        ModelError: that takes too long.
    """
    try:
        return regex.match(pattern, name, timeout=_TIMEOUT_S) is not None
    except TimeoutError:
        raise bad_value(key, pattern, f"a pattern that matches {name!r} in {_TIMEOUT_S:g} s") from None
