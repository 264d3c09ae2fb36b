"""The prompt of a chat: its messages and tools, and how they are rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from naiad.openai_server.api.bodies import ChatBody, TokenizeBody
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.messages import chat_options, plain_messages
from naiad.openai_server.api.parsing.call_finder import CallRules
from naiad.openai_server.api.parsing.output_parser import OutputGrammar
from naiad.openai_server.api.tools import ToolUse, read_tools
from naiad.tokenization import ChatOptions, Tokenizer


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat, before it is rendered.

    Attributes:
        messages: the messages as the chat template gets them.
        options: how they are rendered.
        use: the tools, and how they may be called.
    """

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    use: ToolUse

    def call_rules(self, outputs: OutputGrammar) -> CallRules | None:
        """Which calls are looked for in the outputs, and how; None: none."""
        family = outputs.guarded_calls if self.use.is_constrained else outputs.calls
        if family is None or not self.use.callable:
            return None
        return CallRules(
            family=family,
            tools={tool.name: tool.parameters for tool in self.use.callable},
            max_calls=None if self.use.allows_several else 1,
            are_certain=self.use.is_constrained,
        )


def read_chat_prompt(
    body: ChatBody | TokenizeBody,
    sent_messages: Sequence[dict[str, Any]],
    outputs: OutputGrammar,
    tokenizer: Tokenizer,
) -> ChatPrompt:
    """Read the messages and the tools of a body.

    Args:
        body: the body.
        sent_messages: its messages.
        outputs: how the model writes.
        tokenizer: the model's, which has its chat template.

    Raises:
        APIError: they are not valid, or the chat template does not show them, or it is not known how the
            model calls tools.
    """
    choice = (body.tool_choice, body.parallel_tool_calls) if isinstance(body, ChatBody) else (None, None)
    messages, use = plain_messages(sent_messages), read_tools(body.tools, *choice)
    options = chat_options(body, messages, use.tools)
    if options.speaks_tools and not tokenizer.takes_tools:
        raise _no_tools(
            "the chat template of this model takes no tools: expected none, or tool_choice none, and no "
            "messages with tool_calls or of the role tool"
        )
    if use.tools and outputs.calls is None:
        raise _no_tools(
            "how this model writes calls of tools is not known: expected no tools, or tool_choice none (the "
            "server's option --openai-tool-parser names a way)"
        )
    return ChatPrompt(messages, options, use)


def _no_tools(problem: str) -> APIError:
    return APIError(400, f"tools: {problem}.", param="tools", code="unsupported_value")
