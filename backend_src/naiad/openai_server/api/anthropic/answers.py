"""The body of a message and the events of its stream as types, in Anthropic's words."""

from __future__ import annotations

import msgspec

from naiad.openai_server.api.answers import NamedEvent, Usage
from naiad.openai_server.api.anthropic.errors import MessageError


class MessageOutputTokens(msgspec.Struct):
    """Details of the output's tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Number of tokens; those of the prompt that came from the cache are counted by themselves."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: MessageOutputTokens

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        """The usage of a chat in Anthropic's words."""
        num_cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=MessageOutputTokens(usage.completion_tokens_details.reasoning_tokens),
        )


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """The text of a message."""

    text: str
    citations: None = None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call of a tool; in a stream it begins without input."""

    id: str
    name: str
    input: msgspec.Raw


Block = TextBlock | ToolUseBlock


class MessageAnswer(msgspec.Struct, kw_only=True, tag="message"):
    """The body of an answer; in a stream it begins without content."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(NamedEvent, kw_only=True, tag="message_start"):
    """The first event."""

    message: MessageAnswer


class BlockStart(NamedEvent, kw_only=True, tag="content_block_start"):
    """A block of the content begins."""

    index: int = 0
    content_block: Block


class Ping(NamedEvent, kw_only=True, tag="ping"):
    """Clients pass over it."""


class AddedText(msgspec.Struct, kw_only=True, tag="text_delta"):
    """New text."""

    text: str


class AddedInput(msgspec.Struct, kw_only=True, tag="input_json_delta"):
    """New text of a call's input, which is JSON."""

    partial_json: str


class BlockDelta(NamedEvent, kw_only=True, tag="content_block_delta"):
    """What is added to a block."""

    index: int = 0
    delta: AddedText | AddedInput


class BlockStop(NamedEvent, kw_only=True, tag="content_block_stop"):
    """A block has ended."""

    index: int = 0


class Ending(msgspec.Struct, kw_only=True):
    """Why a message has ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(NamedEvent, kw_only=True, tag="message_delta"):
    """What is known at the end of a message."""

    delta: Ending
    usage: MessageUsage


class MessageStop(NamedEvent, kw_only=True, tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart | BlockStart | Ping | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError
)
