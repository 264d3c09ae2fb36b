"""A row of a stream without coalescing: each token has its own response."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from naiad.outputs import RequestOutput
from naiad.triton_server.responses.stream import StreamRow


@dataclass(slots=True)
class EachTokenRow(StreamRow):
    """A row that never merges outputs and never waits for an acknowledgement: one response per token."""

    later: deque[RequestOutput] = field(default_factory=deque)

    def add(self, output: RequestOutput) -> None:
        """Queue an output after those that are not sent yet."""
        self.later.append(output)
        self._refill()

    def may_send(self, is_streaming: bool) -> bool:
        """Whether there is something to send."""
        self._refill()
        return self.pending is not None and not self.is_finished

    def _refill(self) -> None:
        if self.pending is None and self.later:
            self.pending = self.later.popleft()
