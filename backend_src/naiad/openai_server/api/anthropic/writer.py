"""Writes a message, in one piece or as the events of a stream."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from naiad.openai_server.api.anthropic.answers import (
    AddedText,
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    TextBlock,
)
from naiad.openai_server.api.anthropic.body import MessageBody
from naiad.openai_server.api.anthropic.errors import body_of
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.api.tally import SequenceDelta, Tally
from naiad.tokenization import TokenTable


class MessageWriter:
    """The answer to `POST /v1/messages`: one block of text. What the model reasons is counted, not sent."""

    ends_with_done: ClassVar[bool] = False

    def __init__(
        self, body: MessageBody, _asked: AskedGeneration, _table: TokenTable, answer_id: str
    ) -> None:
        """Set up."""
        self._id = answer_id
        self._model = body.model
        self._has_started = False

    def opening(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`: nothing, as the first event says how much of the prompt was cached."""
        return []

    def chunks(self, delta: SequenceDelta, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        events: list[msgspec.Struct] = []
        if not self._has_started:
            self._has_started = True
            message = MessageAnswer(id=self._id, model=self._model, usage=MessageUsage.of(tally.usage))
            events += [MessageStart(message=message), BlockStart(content_block=TextBlock(text="")), Ping()]
        text = delta.parts.content
        if text:
            events.append(BlockDelta(delta=AddedText(text=text)))
        return events

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        end = MessageDelta(delta=_ending(tally), usage=MessageUsage.of(tally.usage))
        return [BlockStop(), end, MessageStop()]

    def failed(self, error: APIError) -> list[msgspec.Struct]:
        """See `Writer`."""
        return [body_of(error)]

    def whole(self, tally: Tally) -> MessageAnswer:
        """See `Writer`."""
        ending = _ending(tally)
        return MessageAnswer(
            id=self._id,
            model=self._model,
            content=[TextBlock(text=tally.choices[0].text)],
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=MessageUsage.of(tally.usage),
        )


def _ending(tally: Tally) -> Ending:
    (choice,) = tally.choices
    assert choice.last is not None
    if choice.last.finish_reason != "stop":
        return Ending(stop_reason="max_tokens", stop_sequence=None)
    if choice.last.output.is_cut:
        return Ending(stop_reason="stop_sequence", stop_sequence=choice.last.output.stop_reason)
    return Ending(stop_reason="end_turn", stop_sequence=None)
