"""A running generation, whichever protocol its chunks come by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from naiad_client.errors import ServerError


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of the server.

    Attributes:
        text: new text; may be empty on the last chunk.
        finish_reason: "stop", "length", "timeout", "cancelled"; None before the last chunk.
        num_output_tokens: new tokens of this chunk; 0 if not requested.
        num_input_tokens: tokens of the prompt; 0 if not requested.
    """

    text: str
    finish_reason: str | None = None
    num_output_tokens: int = 0
    num_input_tokens: int = 0


# A chunk, unless the message had none, and whether it was the last message.
Answer = tuple[Chunk | None, bool]


class Generation(Iterator[Chunk]):
    """A running request. Iterate over its chunks; closing it early cancels it."""

    def __init__(self, answers: Iterator[Answer], stop: Callable[[], None]) -> None:
        """Wrap the server's answers; `stop` ends the request from any thread."""
        self._answers = answers
        self._stop = stop
        self._is_done = False

    def __next__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            ServerError: the request failed; the error has the server's message.
        """
        while not self._is_done:
            try:
                chunk, is_final = next(self._answers)
            except StopIteration:
                break
            except ServerError:
                if self._is_done:
                    # It was cancelled.
                    break
                self.close()
                raise
            self._is_done |= is_final
            if chunk is not None:
                return chunk
        self._is_done = True
        raise StopIteration

    def cancel(self) -> None:
        """Cancel the request at the server; no more chunks come."""
        self._is_done = True
        self._stop()

    def close(self) -> None:
        """Cancel a running generation; do nothing if it has ended."""
        if not self._is_done:
            self.cancel()

    def __enter__(self) -> Generation:
        """Enter a `with` block; leaving it cancels a running generation."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel a running generation."""
        self.close()

    def __del__(self) -> None:
        """Cancel a generation that is no longer referenced, so that it stops running in the server."""
        self.close()
