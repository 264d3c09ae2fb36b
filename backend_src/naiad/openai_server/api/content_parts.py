"""The keys of parts of a message's content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What clients send back with an answer, and a mark of other servers: here every prefix may be cached.
_WITHOUT_EFFECT = ("annotations", "logprobs", "id", "index", "cache_control")


def text_key(part: Mapping[str, Any]) -> str:
    """The key that has the text of a part."""
    return "refusal" if part.get("type") == "refusal" else "text"


def unknown_part_keys(part: Mapping[str, Any]) -> list[str]:
    """The keys of a part of text that ask for something which is not known."""
    known = ("type", text_key(part), *_WITHOUT_EFFECT)
    return [key for key, value in part.items() if key not in known and value not in (None, [], "")]


def pass_over_part_keys(messages: Any) -> list[str]:
    """Drop the unknown keys of parts in unchecked messages; return `messages.KEY` for each."""
    dropped = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            for key in unknown_part_keys(part) if isinstance(part, dict) else ():
                del part[key]
                dropped.append(f"messages.{key}")
    return dropped
