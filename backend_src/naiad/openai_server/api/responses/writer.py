"""Writes a response, in one piece or as the events of a stream."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any, ClassVar

import msgspec

from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.log_probs import LogProbWriter
from naiad.openai_server.api.parsing.pieces import CallDelta, ContentPart
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.api.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    ErrorEvent,
    FunctionCallItem,
    IncompleteDetails,
    Item,
    ItemAdded,
    ItemDone,
    ItemEvent,
    MessageItem,
    OutputText,
    PartAdded,
    PartDone,
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
    TextForm,
    TextFormat,
)
from naiad.openai_server.api.responses.body import ResponseBody
from naiad.openai_server.api.responses.tools import shown_choice, shown_tools
from naiad.openai_server.api.tally import SequenceDelta, Tally
from naiad.tokenization import TokenTable

_COMPLETED, _INCOMPLETE, _IN_PROGRESS = "completed", "incomplete", "in_progress"


class ResponseWriter:
    """The answer to `POST /v1/responses`: items for what the model reasons, says and calls."""

    ends_with_done: ClassVar[bool] = False

    def __init__(self, body: ResponseBody, asked: AskedGeneration, table: TokenTable, answer_id: str) -> None:
        """Set up; `table` holds the tokens of the model that answers."""
        number = asked.num_log_probs
        self._log_probs = None if number is None else LogProbWriter(table, number)
        self._name = answer_id.removeprefix("resp_")
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
            text=TextForm((body.text and body.text.format) or TextFormat()),
            tools=shown_tools(body.tools),
            tool_choice=shown_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        self._num_events = 0
        self._open: Item | None = None  # the last item of a stream, until it ends
        self._output: list[Item] = []  # the items that have ended

    def opening(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        return [self._response_event(ResponseCreated), self._response_event(ResponseInProgress)]

    def chunks(self, delta: SequenceDelta, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        events: list[msgspec.Struct] = []
        if delta.parts.reasoning:
            events += self._reasoned(delta.parts.reasoning)
        for part in delta.parts.in_order():
            events += self._said(part) if isinstance(part, ContentPart) else self._called(part)
        return events

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        status = _status(tally)
        events: list[msgspec.Struct] = []
        if self._open is None and not self._output:
            events += self._begun(self._message_item())
        events += self._ended(status)
        self._finish(tally)
        ended = ResponseCompleted if status == _COMPLETED else ResponseIncomplete
        return [*events, self._response_event(ended)]

    def failed(self, error: APIError) -> list[msgspec.Struct]:
        """See `Writer`."""
        details = error.details
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        unfinished = [] if self._open is None else [msgspec.structs.replace(self._open, status=_INCOMPLETE)]
        self._response = msgspec.structs.replace(
            self._response,
            status="failed",
            error=ResponseError(code, details.message),
            output=[*self._output, *unfinished],
        )
        event = ErrorEvent(code=code, message=details.message, sequence_number=self._next())
        return [event, self._response_event(ResponseFailed)]

    def whole(self, tally: Tally) -> Response:
        """See `Writer`."""
        (choice,) = tally.choices
        if choice.reasoning:
            self._reasoned(choice.reasoning)
        for part in choice.in_order():
            if isinstance(part, ContentPart):
                self._said(part)
            else:
                self._called(CallDelta(0, part.call_id, part.name, part.arguments))
        self.closing(tally)
        return self._response

    def _finish(self, tally: Tally) -> None:
        status = _status(tally)
        self._response = msgspec.structs.replace(
            self._response,
            status=status,
            completed_at=int(time.time()) if status == _COMPLETED else None,
            incomplete_details=_incomplete(tally),
            output=self._output,
            usage=ResponseUsage.of(tally.usage),
        )

    def _reasoned(self, text: str) -> list[msgspec.Struct]:
        """The events of new reasoning."""
        item = self._open
        events: list[msgspec.Struct] = []
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(id=self._id("rs"), status=_IN_PROGRESS, content=[ReasoningText(text="")])
            events += self._begun(item)
        item.content[0].text += text
        return [*events, ReasoningDelta(delta=text, **self._place(item.id))]

    def _said(self, part: ContentPart) -> list[msgspec.Struct]:
        """The events of new text."""
        item = self._open
        events: list[msgspec.Struct] = []
        if not isinstance(item, MessageItem):
            item = self._message_item()
            events += self._begun(item)
        tokens = (
            [] if self._log_probs is None else self._log_probs.chat(part.token_ids, part.log_probs).content
        )
        if not part.text and not tokens:
            return events
        item.content[0].text += part.text
        item.content[0].logprobs += tokens
        return [*events, TextDelta(delta=part.text, logprobs=tokens, **self._place(item.id))]

    def _called(self, call: CallDelta) -> list[msgspec.Struct]:
        """The events of what is new of a call."""
        events: list[msgspec.Struct] = []
        if call.name:
            item = FunctionCallItem(
                id=self._id("fc"), call_id=call.call_id, name=call.name, arguments="", status=_IN_PROGRESS
            )
            events += self._begun(item)
        if call.arguments:
            assert isinstance(self._open, FunctionCallItem)
            self._open.arguments += call.arguments
            events.append(ArgumentsDelta(delta=call.arguments, **self._place(self._open.id)))
        return events

    def _begun(self, item: Item) -> list[msgspec.Struct]:
        """The events before an item's first text, which end the item before it."""
        events = self._ended(_COMPLETED)
        self._open = item
        if isinstance(item, FunctionCallItem):
            # A copy, as the item grows.
            return [*events, self._item_event(ItemAdded, msgspec.structs.replace(item))]
        begin = self._item_event(ItemAdded, msgspec.structs.replace(item, content=[]))
        return [*events, begin, PartAdded(part=deepcopy(item.content[0]), **self._place(item.id))]

    def _ended(self, status: str) -> list[msgspec.Struct]:
        """The events behind the last text of the open item; none without one."""
        item = self._open
        if item is None:
            return []
        events: list[msgspec.Struct] = []
        match item:
            case ReasoningItem(content=[part]):
                events.append(ReasoningDone(text=part.text, **self._place(item.id)))
                events.append(PartDone(part=part, **self._place(item.id)))
            case MessageItem(content=[part]):
                events.append(TextDone(text=part.text, logprobs=part.logprobs, **self._place(item.id)))
                events.append(PartDone(part=part, **self._place(item.id)))
            case FunctionCallItem(name=name, arguments=arguments):
                events.append(ArgumentsDone(name=name, arguments=arguments, **self._place(item.id)))
        item.status = status
        events.append(self._item_event(ItemDone, item))
        self._output.append(item)
        self._open = None
        return events

    def _message_item(self) -> MessageItem:
        part = OutputText(text="", logprobs=[])
        return MessageItem(id=self._id("msg"), status=_IN_PROGRESS, content=[part])

    def _id(self, kind: str) -> str:
        """The id of the item that begins; only the first of its kind has no number."""
        number = sum(
            item.id.startswith(f"{kind}_") for item in [*self._output, *([self._open] if self._open else [])]
        )
        return f"{kind}_{self._name}_{number}" if number else f"{kind}_{self._name}"

    def _response_event(self, kind: type[ResponseEvent]) -> ResponseEvent:
        return kind(response=self._response, sequence_number=self._next())

    def _item_event(self, kind: type[ItemEvent], item: Item) -> ItemEvent:
        return kind(output_index=len(self._output), item=item, sequence_number=self._next())

    def _place(self, item_id: str) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": len(self._output), "sequence_number": self._next()}

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _status(tally: Tally) -> str:
    (choice,) = tally.choices
    is_cut = choice.finish_reason == "length" or choice.has_open_call
    return _INCOMPLETE if is_cut else _COMPLETED


def _incomplete(tally: Tally) -> IncompleteDetails | None:
    """Why a response is not complete; None: it is."""
    if _status(tally) == _COMPLETED:
        return None
    (choice,) = tally.choices
    return IncompleteDetails("max_output_tokens" if choice.finish_reason == "length" else None)
