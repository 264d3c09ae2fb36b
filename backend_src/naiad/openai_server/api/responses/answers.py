"""The body of a response and the events of its stream as types, in the official client's words."""

from __future__ import annotations

from typing import Any

import msgspec

from naiad.openai_server.api.answers import ChatToken, NamedEvent, Usage


class ResponseInputTokens(msgspec.Struct, kw_only=True):
    """Details of the input's tokens; the cache writes by itself, which is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseOutputTokens(msgspec.Struct):
    """Details of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Number of tokens of a response."""

    input_tokens: int
    input_tokens_details: ResponseInputTokens
    output_tokens: int
    output_tokens_details: ResponseOutputTokens
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        """The usage of a chat in the words of responses."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=ResponseInputTokens(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ResponseOutputTokens(usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[str] = []
    logprobs: list[ChatToken]


class ReasoningText(msgspec.Struct, kw_only=True, tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag="message"):
    """What the assistant said."""

    id: str
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """What the assistant reasoned before; it is never summarized."""

    id: str
    status: str
    summary: list[str] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call of a tool; the client answers with the call's id."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


Item = MessageItem | ReasoningItem | FunctionCallItem
Part = OutputText | ReasoningText


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is not complete; null: a stop string or id stands in the arguments of a call."""

    reason: str | None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"
):
    """JSON of a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextForm(msgspec.Struct, frozen=True):
    """The form of a text."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat = TextFormat()


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag="function"):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, tag="function"):
    """The function that has to be called."""

    name: str


class ReasoningForm(msgspec.Struct, frozen=True):
    """The reasoning options of the request; there are none."""

    effort: None = None
    summary: None = None


class Response(msgspec.Struct, kw_only=True):
    """A response, whose output grows while it is in progress."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: dict[str, str]
    user: str | None
    text: TextForm = TextForm()
    reasoning: ReasoningForm = ReasoningForm()
    tools: list[FunctionTool] = []
    tool_choice: str | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: None = None
    previous_response_id: None = None
    truncation: str = "disabled"
    service_tier: str = "default"
    background: bool = False
    store: bool = False


class StreamEvent(NamedEvent, kw_only=True):
    """An event of a streamed response; the first one has the number 0."""

    sequence_number: int


class ResponseEvent(StreamEvent, kw_only=True):
    """Something has happened to the response."""

    response: Response


class ResponseCreated(ResponseEvent, tag="response.created"):
    """The engine has taken the request."""


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    """Output follows."""


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    """The model has ended its answer."""


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    """The answer has been cut off."""


class ResponseFailed(ResponseEvent, tag="response.failed"):
    """Something failed."""


class ItemEvent(StreamEvent, kw_only=True):
    """An item of the output begins or has ended."""

    output_index: int
    item: Item


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    """An item begins, without content."""


class ItemDone(ItemEvent, tag="response.output_item.done"):
    """An item has ended."""


class PartEvent(StreamEvent, kw_only=True):
    """An item's part begins or has ended."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: Part


class PartAdded(PartEvent, tag="response.content_part.added"):
    """A part begins, without text."""


class PartDone(PartEvent, tag="response.content_part.done"):
    """A part has ended."""


class TextDelta(StreamEvent, kw_only=True, tag="response.output_text.delta"):
    """A message's new text."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatToken]


class TextDone(StreamEvent, kw_only=True, tag="response.output_text.done"):
    """The whole text of a message."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatToken]


class ReasoningDelta(StreamEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """New reasoning."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(StreamEvent, kw_only=True, tag="response.reasoning_text.done"):
    """All of the reasoning."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDelta(StreamEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """New text of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(StreamEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(StreamEvent, kw_only=True, tag="error"):
    """Something failed; the failed response follows."""

    code: str
    message: str
    param: str | None = None


ResponseStreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | ReasoningDelta
    | ReasoningDone
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
)
