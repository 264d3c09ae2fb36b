"""Where reuse of earlier prompts' KV is decided."""

from __future__ import annotations

from typing import Protocol


class PrefixCache(Protocol):
    """Knows which full blocks hold the KV of which tokens."""

    def lookup(self, token_ids: list[int]) -> list[int]:
        """Block ids, in order, that hold the KV of the longest known beginning of `token_ids`.

        At least one token is left over: its logits have to be computed.
        """


class NoPrefixCache:
    """Knows nothing: every prompt is computed."""

    def lookup(self, token_ids: list[int]) -> list[int]:
        """No block."""
        return []
