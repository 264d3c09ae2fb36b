"""Several sequences of one prompt that have one response together."""

from __future__ import annotations

from dataclasses import dataclass, field

from naiad.outputs import RequestOutput
from naiad.triton_server.response_stream import StreamRow, merged


@dataclass(slots=True)
class JoinedRow(StreamRow):
    """It has something to say when every one of its sequences has ended.

    Attributes:
        sibling_ids: of the further sequences, in order.
        parts: id → what it has said.
    """

    sibling_ids: tuple[int, ...] = ()
    parts: dict[int, RequestOutput] = field(default_factory=dict)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """Of all sequences, in order."""
        return self.sequence_id, *self.sibling_ids

    @property
    def abort_ids(self) -> tuple[int, ...]:
        """Each sequence ends alone."""
        return self.sequence_ids

    def add(self, output: RequestOutput) -> None:
        """Keep what a sequence said; the first one stands for the whole row."""
        earlier = self.parts.get(output.sequence_id)
        self.parts[output.sequence_id] = output if earlier is None else merged(earlier, output)
        ended = [part for part in self.parts.values() if part.finish_reason is not None]
        if len(ended) == len(self.sequence_ids):
            self.pending = self.parts[self.sequence_id]

    def in_order(self, num_parts: int) -> list[RequestOutput]:
        """What so many sequences said, in order."""
        return [self.parts[each] for each in self.sequence_ids[:num_parts]]
