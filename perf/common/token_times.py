"""The arrival times of a stream's tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenTimes:
    """The token times of one request, in seconds from an origin that the caller chooses.

    Attributes:
        first_s, last_s: the times of the first and the last token; None if no token came.
    """

    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0

    @property
    def inter_token_s(self) -> float | None:
        """Mean time between tokens; None for fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def take(self, num_tokens: int, now_s: float) -> list[float]:
        """Count a response's tokens.

        Returns:
            For each token except the stream's first, the time since the previous token. Tokens of one
            response share its time equally; those in the first response have 0. The sum over a stream is
            the time from the first token to the last.
        """
        if not num_tokens:
            return []
        before_s, self.last_s = self.last_s, now_s
        self.num_tokens += num_tokens
        if self.first_s is None or before_s is None:
            self.first_s = now_s
            return [0.0] * (num_tokens - 1)
        return [(now_s - before_s) / num_tokens] * num_tokens
