"""Writes a message, in one piece or as the events of a stream."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from naiad.openai_server.api.anthropic.answers import (
    AddedInput,
    AddedText,
    Block,
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
    ToolUseBlock,
)
from naiad.openai_server.api.anthropic.body import MessageBody
from naiad.openai_server.api.anthropic.errors import body_of
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.parsing.pieces import CallDelta, ContentPart
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.api.tally import SequenceDelta, Tally, ToolCall
from naiad.tokenization import TokenTable


class MessageWriter:
    """The answer to `POST /v1/messages`: text and calls. What the model reasons is counted, not sent."""

    ends_with_done: ClassVar[bool] = False

    def __init__(
        self, body: MessageBody, _asked: AskedGeneration, _table: TokenTable, answer_id: str
    ) -> None:
        """Set up."""
        self._id = answer_id
        self._model = body.model
        self._has_started = False
        self._open: Block | None = None  # the last block of a stream, until it ends
        self._num_blocks = 0  # those that have begun

    def opening(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`: nothing, as the first event says how much of the prompt was cached."""
        return []

    def chunks(self, delta: SequenceDelta, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        events: list[msgspec.Struct] = []
        if not self._has_started:
            self._has_started = True
            message = MessageAnswer(id=self._id, model=self._model, usage=MessageUsage.of(tally.usage))
            events += [MessageStart(message=message), Ping()]
        for part in delta.parts.in_order():
            if isinstance(part, ContentPart):
                events += self._said(part.text)
            else:
                events += self._called(part)
        return events

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        events = [] if self._num_blocks else self._begun(TextBlock(text=""))
        end = MessageDelta(delta=_ending(tally), usage=MessageUsage.of(tally.usage))
        return [*events, *self._ended(), end, MessageStop()]

    def failed(self, error: APIError) -> list[msgspec.Struct]:
        """See `Writer`."""
        return [body_of(error)]

    def whole(self, tally: Tally) -> MessageAnswer:
        """See `Writer`."""
        ending = _ending(tally)
        blocks = [_block(part) for part in tally.choices[0].in_order()]
        return MessageAnswer(
            id=self._id,
            model=self._model,
            content=[block for block in blocks if block is not None] or [TextBlock(text="")],
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=MessageUsage.of(tally.usage),
        )

    def _said(self, text: str) -> list[msgspec.Struct]:
        if not text:
            return []
        events = [] if isinstance(self._open, TextBlock) else self._begun(TextBlock(text=""))
        return [*events, BlockDelta(index=self._num_blocks - 1, delta=AddedText(text=text))]

    def _called(self, call: CallDelta) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if call.name:
            events += self._begun(ToolUseBlock(id=call.call_id, name=call.name, input=msgspec.Raw(b"{}")))
        if call.arguments:
            added = AddedInput(partial_json=call.arguments)
            events.append(BlockDelta(index=self._num_blocks - 1, delta=added))
        return events

    def _begun(self, block: Block) -> list[msgspec.Struct]:
        """The events before a block's first text, which end the block before it."""
        events = self._ended()
        self._open = block
        self._num_blocks += 1
        return [*events, BlockStart(index=self._num_blocks - 1, content_block=block)]

    def _ended(self) -> list[msgspec.Struct]:
        """The end of the open block, if there is one."""
        if self._open is None:
            return []
        self._open = None
        return [BlockStop(index=self._num_blocks - 1)]


def _block(part: ContentPart | ToolCall) -> Block | None:
    """The block of a part; None: it has no text."""
    if isinstance(part, ContentPart):
        return TextBlock(text=part.text) if part.text else None
    return ToolUseBlock(id=part.call_id, name=part.name, input=_input(part.arguments))


def _input(arguments: str) -> msgspec.Raw:
    """A call's input, which is an object; that of a call that was cut off is none."""
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(b"{}")
    return msgspec.Raw(arguments.encode())


def _ending(tally: Tally) -> Ending:
    (choice,) = tally.choices
    assert choice.last is not None
    match choice.finish_reason:
        case "length":
            return Ending(stop_reason="max_tokens", stop_sequence=None)
        case "tool_calls":
            return Ending(stop_reason="tool_use", stop_sequence=None)
    output = choice.last.output
    if output.is_cut or choice.has_open_call:
        # An id that ends a call is no text.
        sequence = output.stop_reason if output.is_cut else None
        return Ending(stop_reason="stop_sequence", stop_sequence=sequence)
    return Ending(stop_reason="end_turn", stop_sequence=None)
