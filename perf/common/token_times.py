"""When a stream's tokens came."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenTimes:
    """Of one request; seconds since whatever its times count from.

    Attributes:
        first_s, last_s: None: no token came.
    """

    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0

    @property
    def inter_token_s(self) -> float | None:
        """Mean time from a token to the next; None for less than two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def take(self, num_tokens: int, now_s: float) -> list[float]:
        """Count a response's tokens.

        Returns:
            For each token but the first of all the time since the one before it. Tokens of a response
            share its time equally; those beside the first of all took none. They sum up to the time
            from the first token to the last.
        """
        if not num_tokens:
            return []
        before_s, self.last_s = self.last_s, now_s
        self.num_tokens += num_tokens
        if self.first_s is None or before_s is None:
            self.first_s = now_s
            return [0.0] * (num_tokens - 1)
        return [(now_s - before_s) / num_tokens] * num_tokens
