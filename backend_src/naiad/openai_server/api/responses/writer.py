"""Writes a response, in one piece or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from naiad.openai_server.api.answers import ChatToken
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.log_probs import LogProbWriter
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.api.responses.answers import (
    ErrorEvent,
    IncompleteDetails,
    Item,
    ItemAdded,
    ItemDone,
    ItemEvent,
    MessageItem,
    OutputText,
    Part,
    PartAdded,
    PartDone,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
    TextDelta,
    TextDone,
)
from naiad.openai_server.api.responses.body import ResponseBody
from naiad.openai_server.api.tally import SequenceDelta, Tally
from naiad.outputs import TokenLogProbs
from naiad.tokenization import TokenTable

_COMPLETED, _INCOMPLETE = "completed", "incomplete"


class ResponseWriter:
    """The answer to `POST /v1/responses`: a reasoning item if the model reasons, and a message."""

    ends_with_done: ClassVar[bool] = False

    def __init__(self, body: ResponseBody, asked: AskedGeneration, table: TokenTable, answer_id: str) -> None:
        """Set up; `table` holds the tokens of the model that answers."""
        number = asked.num_log_probs
        self._log_probs = None if number is None else LogProbWriter(table, number)
        name = answer_id.removeprefix("resp_")
        self._message_id, self._reasoning_id = f"msg_{name}", f"rs_{name}"
        self._response = Response(
            id=answer_id,
            created_at=int(time.time()),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=body.model,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_logprobs=body.top_logprobs or 0,
            metadata=body.metadata or {},
            user=body.user,
        )
        self._num_events = 0
        self._reasoning = ""
        self._text = ""
        self._text_log_probs: list[ChatToken] = []
        self._open: Item | None = None  # the last item of a stream, until it ends
        self._output: list[Item] = []  # the items of a stream that have ended

    def opening(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        return [self._response_event(ResponseCreated), self._response_event(ResponseInProgress)]

    def chunks(self, delta: SequenceDelta, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        events: list[msgspec.Struct] = []
        parts = delta.parts
        if parts.reasoning:
            events += self._begun(self._reasoning_item("", "in_progress"))
            self._reasoning += parts.reasoning
            place = self._place(self._reasoning_id)
            events.append(ReasoningDelta(delta=parts.reasoning, **place))
        log_probs = self._tokens(parts.content_ids, parts.content_log_probs)
        if parts.content or parts.content_ids:
            events += self._begun(self._message_item("", [], "in_progress"))
        if parts.content or log_probs:
            self._text += parts.content
            self._text_log_probs += log_probs
            place = self._place(self._message_id)
            events.append(TextDelta(delta=parts.content, logprobs=log_probs, **place))
        return events

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        status = _status(tally)
        events: list[msgspec.Struct] = []
        if self._open is None and not self._output:
            events += self._begun(self._message_item("", [], "in_progress"))
        events += self._ended(status)
        self._finish(tally)
        ended = ResponseCompleted if status == _COMPLETED else ResponseIncomplete
        return [*events, self._response_event(ended)]

    def failed(self, error: APIError) -> list[msgspec.Struct]:
        """See `Writer`."""
        details = error.details
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response = msgspec.structs.replace(
            self._response,
            status="failed",
            error=ResponseError(code, details.message),
            output=[*self._output, *self._unfinished()],
        )
        event = ErrorEvent(code=code, message=details.message, sequence_number=self._next())
        return [event, self._response_event(ResponseFailed)]

    def whole(self, tally: Tally) -> Response:
        """See `Writer`."""
        (choice,) = tally.choices
        status = _status(tally)
        speaks = bool(choice.text or choice.content_ids or not choice.reasoning)
        if choice.reasoning:
            ended = _COMPLETED if speaks else status
            self._output.append(self._reasoning_item(choice.reasoning, ended))
        if speaks:
            tokens = self._tokens(choice.content_ids, choice.log_probs)
            self._output.append(self._message_item(choice.text, tokens, status))
        self._finish(tally)
        return self._response

    def _finish(self, tally: Tally) -> None:
        status = _status(tally)
        self._response = msgspec.structs.replace(
            self._response,
            status=status,
            completed_at=int(time.time()) if status == _COMPLETED else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == _INCOMPLETE else None,
            output=self._output,
            usage=ResponseUsage.of(tally.usage),
        )

    def _begun(self, item: Item) -> list[msgspec.Struct]:
        """The events before an item's first text, which end the item before it; none if it has begun."""
        if self._open is not None and self._open.id == item.id:
            return []
        events = self._ended(_COMPLETED)
        self._open = item
        begin = self._item_event(ItemAdded, msgspec.structs.replace(item, content=[]))
        return [*events, begin, self._part_event(PartAdded, item.content[0])]

    def _ended(self, status: str) -> list[msgspec.Struct]:
        """The events behind the last text of the open item; none without one."""
        if self._open is None:
            return []
        (item,) = self._unfinished(status)
        place = self._place(item.id)
        done: msgspec.Struct
        if isinstance(item, ReasoningItem):
            done = ReasoningDone(text=self._reasoning, **place)
        else:
            done = TextDone(text=self._text, logprobs=self._text_log_probs, **place)
        part = self._part_event(PartDone, item.content[0])
        end = self._item_event(ItemDone, item)
        self._output.append(item)
        self._open = None
        return [done, part, end]

    def _unfinished(self, status: str = _INCOMPLETE) -> list[Item]:
        """The open item with its text so far."""
        match self._open:
            case ReasoningItem():
                return [self._reasoning_item(self._reasoning, status)]
            case MessageItem():
                return [self._message_item(self._text, self._text_log_probs, status)]
        return []

    def _reasoning_item(self, text: str, status: str) -> ReasoningItem:
        return ReasoningItem(id=self._reasoning_id, status=status, content=[ReasoningText(text=text)])

    def _message_item(self, text: str, log_probs: list[ChatToken], status: str) -> MessageItem:
        part = OutputText(text=text, logprobs=log_probs)
        return MessageItem(id=self._message_id, status=status, content=[part])

    def _response_event(self, kind: type[ResponseEvent]) -> ResponseEvent:
        return kind(response=self._response, sequence_number=self._next())

    def _item_event(self, kind: type[ItemEvent], item: Item) -> ItemEvent:
        return kind(
            output_index=len(self._output),
            item=item,
            sequence_number=self._next(),
        )

    def _part_event(self, kind: type[PartEvent], part: Part) -> PartEvent:
        assert self._open is not None
        return kind(part=part, **self._place(self._open.id))

    def _place(self, item_id: str) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": len(self._output), "sequence_number": self._next()}

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _tokens(self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs]) -> list[ChatToken]:
        return [] if self._log_probs is None else self._log_probs.chat(token_ids, log_probs).content


def _status(tally: Tally) -> str:
    (choice,) = tally.choices
    assert choice.last is not None
    return _COMPLETED if choice.last.finish_reason == "stop" else _INCOMPLETE
