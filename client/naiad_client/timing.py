"""When the tokens of an answer arrived."""

from __future__ import annotations

from dataclasses import dataclass

from naiad_client.generation import Chunk


@dataclass(slots=True)
class Timing:
    """When tokens arrived.

    Attributes:
        start_s, first_s, last_s: times of `time.monotonic`; first_s is None before the first token.
        num_first_tokens: tokens of the first chunk that had any.
        num_tokens: all tokens.
    """

    start_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_first_tokens: int = 0
    num_tokens: int = 0

    def take(self, chunk: Chunk, now_s: float) -> None:
        """Count the tokens of a chunk that arrived at `now_s`."""
        if not chunk.num_output_tokens:
            return
        if self.first_s is None:
            self.first_s = now_s
            self.num_first_tokens = chunk.num_output_tokens
        self.last_s = now_s
        self.num_tokens += chunk.num_output_tokens

    def summary(self) -> str:
        """The number of tokens, the time to the first token, and the rate from then on, as a line of text."""
        if self.first_s is None:
            return "0 tokens"
        words = [
            f"{self.num_tokens} token" + "s" * (self.num_tokens != 1),
            f"first token after {self.first_s - self.start_s:.3f} s",
        ]
        if self.last_s > self.first_s:
            rate = (self.num_tokens - self.num_first_tokens) / (self.last_s - self.first_s)
            words.insert(1, f"{rate:.1f} tokens/s")
        return ", ".join(words)
