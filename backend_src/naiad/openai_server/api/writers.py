"""Writes the answers of chats and of completions, in one piece or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from naiad.openai_server.api.answers import (
    AddedFunction,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogProbs,
    CompletionAnswer,
    CompletionChoice,
    Delta,
    DeltaToolCall,
    Message,
    MessageToolCall,
    PromptLogProbs,
    Usage,
)
from naiad.openai_server.api.bodies import ChatBody, CompletionBody, StreamOptions
from naiad.openai_server.api.echo import ChoiceLogProbs, DescribedPrompt, EchoedPrompts, joined
from naiad.openai_server.api.errors import APIError, ErrorBody
from naiad.openai_server.api.log_probs import LogProbWriter, with_first
from naiad.openai_server.api.parsing.pieces import CallDelta
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.api.tally import Choice, SequenceDelta, Tally
from naiad.outputs import TokenLogProbs
from naiad.tokenization import TokenTable


class Writer(Protocol):
    """Writes the answer to one request, in one piece or as the events of a stream."""

    # Whether a stream that has not failed ends with [DONE].
    ends_with_done: ClassVar[bool]

    def opening(self, tally: Tally) -> list[msgspec.Struct]:
        """The events before the first token."""

    def chunks(self, delta: SequenceDelta, tally: Tally) -> list[msgspec.Struct]:
        """The events of a delta, which the tally has; why a choice ends comes alone, in its last chunk."""

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """The events after the last choice has ended."""

    def failed(self, error: APIError) -> list[msgspec.Struct]:
        """The events that end a stream early."""

    def whole(self, tally: Tally) -> msgspec.Struct:
        """The answer in one piece."""


class _ChunkUsage:
    """What the chunks of a stream say of its usage."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.is_last_asked = options is not None and bool(options.include_usage)
        self._is_continuous = (
            self.is_last_asked and options is not None and bool(options.continuous_usage_stats)
        )

    def of(self, tally: Tally) -> Usage | UnsetType | None:
        """The usage so far, or null if the last chunk alone has it, or nothing."""
        if self._is_continuous:
            return tally.usage
        return None if self.is_last_asked else UNSET


class ChatWriter:
    """The answer to a chat."""

    ends_with_done: ClassVar[bool] = True

    def __init__(self, body: ChatBody, asked: AskedGeneration, table: TokenTable, answer_id: str) -> None:
        """Set up; `table` holds the tokens of the model that answers."""
        self._body = body
        self._asked = asked
        self._table = table
        self._has_described_prompt = body.prompt_logprobs is None
        self._reasons = asked.reasons and body.include_reasoning is not False
        self._prompt_ids = asked.request.rows[0].prompt_token_ids if body.return_token_ids else UNSET
        self._num_choices = asked.request.num_sequences
        self._log_probs = _log_prob_writer(asked, table, body.return_tokens_as_token_ids)
        self._id = answer_id
        self._created = int(time.time())
        self._usage = _ChunkUsage(body.stream_options)

    def opening(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`: the role of each message."""
        first = Delta(role="assistant", content="")
        chunks: list[msgspec.Struct] = [
            self._chunk(ChatChunkChoice(index=index, delta=first), self._usage.of(tally))
            for index in range(self._num_choices)
        ]
        if self._prompt_ids is not UNSET:
            chunks[0] = msgspec.structs.replace(chunks[0], prompt_token_ids=self._prompt_ids)
        return chunks

    def chunks(self, delta: SequenceDelta, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        made: list[msgspec.Struct] = []
        usage = self._usage.of(tally)
        if not self._has_described_prompt:
            self._has_described_prompt = True
            first = self._chunk(ChatChunkChoice(index=0, delta=Delta()), usage)
            described = self._prompt_log_probs(delta.output.prompt_log_probs)
            made.append(msgspec.structs.replace(first, prompt_logprobs=described))
        if not self._asked.drops_tokens:
            made += [self._chunk(choice, usage) for choice in self._choices_of(delta)]
        if delta.is_last:
            end = ChatChunkChoice(
                index=delta.index,
                delta=Delta(),
                finish_reason=tally.choices[delta.index].finish_reason,
                stop_reason=delta.stop_reason(self._body.stop_token_ids),
            )
            made.append(self._chunk(end, usage))
        return made

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`: the usage, if it was asked for."""
        if not self._usage.is_last_asked:
            return []
        return [
            ChatChunk(
                id=self._id, created=self._created, model=self._body.model, choices=[], usage=tally.usage
            )
        ]

    def failed(self, error: APIError) -> list[msgspec.Struct]:
        """See `Writer`."""
        return [ErrorBody(error.details)]

    def whole(self, tally: Tally) -> ChatAnswer:
        """See `Writer`."""
        return ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._body.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(tally.choices)],
            usage=tally.usage,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._prompt_log_probs(tally.prompt_log_probs(0)),
        )

    def _prompt_log_probs(self, log_probs: Sequence[TokenLogProbs]) -> PromptLogProbs | UnsetType:
        if self._body.prompt_logprobs is None:
            return UNSET
        token_ids = self._asked.request.rows[0].prompt_token_ids
        writer = LogProbWriter(self._table, self._body.prompt_logprobs)
        return writer.prompt(token_ids, with_first(token_ids, log_probs))

    def _choices_of(self, delta: SequenceDelta) -> list[ChatChunkChoice]:
        """What a delta adds to the reasoning, to the content and to the calls of tools."""
        parts, choices = delta.parts, []
        if parts.reasoning and self._reasons:
            added = Delta(reasoning=parts.reasoning, reasoning_content=parts.reasoning)
            choices.append(ChatChunkChoice(index=delta.index, delta=added))
        if parts.content or (parts.content_ids and self._log_probs is not None):
            choices.append(
                ChatChunkChoice(
                    index=delta.index,
                    delta=Delta(content=parts.content),
                    logprobs=self._chat_log_probs(parts.content_ids, parts.content_log_probs),
                )
            )
        for call in parts.calls:
            added = Delta(tool_calls=[_added_call(call)])
            choices.append(ChatChunkChoice(index=delta.index, delta=added))
        if self._body.return_token_ids and delta.output.token_ids:
            if not choices:
                choices.append(ChatChunkChoice(index=delta.index, delta=Delta()))
            choices[0].token_ids = delta.output.token_ids
        return choices

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        assert choice.last is not None
        reasoning = choice.reasoning if self._reasons else UNSET
        calls = [
            MessageToolCall(
                id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments)
            )
            for call in choice.calls
        ]
        return ChatChoice(
            index=index,
            message=Message(
                content=choice.text if choice.text or not calls else None,
                tool_calls=calls or UNSET,
                reasoning=reasoning,
                reasoning_content=reasoning,
            ),
            logprobs=self._chat_log_probs(choice.content_ids, choice.log_probs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.last.stop_reason(self._body.stop_token_ids),
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
        )

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._body.model, choices=[choice], usage=usage
        )

    def _chat_log_probs(
        self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs]
    ) -> ChatLogProbs | None:
        return None if self._log_probs is None else self._log_probs.chat(token_ids, log_probs)


class CompletionWriter:
    """The answer to a completion."""

    ends_with_done: ClassVar[bool] = True

    def __init__(
        self, body: CompletionBody, asked: AskedGeneration, table: TokenTable, answer_id: str
    ) -> None:
        """Set up; `table` holds the tokens of the model that answers."""
        self._body = body
        self._asked = asked
        self._id = answer_id
        self._created = int(time.time())
        self._usage = _ChunkUsage(body.stream_options)
        self._prompts = EchoedPrompts(body, asked, table)
        self._log_probs: list[ChoiceLogProbs] = []
        if asked.num_log_probs is not None:
            writer = LogProbWriter(table, asked.num_log_probs, bool(body.return_tokens_as_token_ids))
            self._log_probs = [
                ChoiceLogProbs(writer, self._prompts.row(index), self._prompts.text(index), bool(body.echo))
                for index in range(asked.request.num_sequences)
            ]
        # Rows whose choices have begun.
        self._opened: set[int] = set()

    def opening(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`: the prompt that each choice begins with, if it is echoed.

        What is said of the prompt's tokens is not known yet; then these chunks come with the first delta.
        """
        if self._prompts.are_described:
            return []
        rows = range(len(self._asked.request.rows))
        return [chunk for row in rows for chunk in self._row_opening(row, [], self._usage.of(tally))]

    def _row_opening(
        self, row: int, log_probs: Sequence[TokenLogProbs], usage: Usage | UnsetType | None
    ) -> list[msgspec.Struct]:
        """The first chunks of the choices of a row, once."""
        if row in self._opened or not (self._prompts.are_sent or self._body.return_token_ids):
            return []
        self._opened.add(row)
        width = self._asked.request.outputs.num_sequences
        described = self._prompts.described(row, log_probs)
        return [
            self._answer(
                [
                    CompletionChoice(
                        index=index,
                        text=self._prompts.text(index),
                        logprobs=described.echoed,
                        prompt_logprobs=described.listed,
                        prompt_token_ids=self._prompt_ids(index),
                    )
                ],
                usage,
            )
            for index in range(row * width, (row + 1) * width)
        ]

    def chunks(self, delta: SequenceDelta, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`."""
        output, usage = delta.output, self._usage.of(tally)
        row = self._prompts.row_index(delta.index)
        made = self._row_opening(row, output.prompt_log_probs, usage)
        token_ids = output.token_ids if self._body.return_token_ids else UNSET
        log_probs = None
        if self._log_probs and not self._asked.drops_tokens:
            log_probs = self._log_probs[delta.index].of(output.token_ids, output.log_probs, output)
        has_details = (output.token_ids and token_ids is not UNSET) or (log_probs and log_probs.tokens)
        if (delta.text or has_details) and not self._asked.drops_tokens:
            choice = CompletionChoice(
                index=delta.index, text=delta.text, logprobs=log_probs, token_ids=token_ids
            )
            made.append(self._answer([choice], usage))
        if delta.is_last:
            end = CompletionChoice(
                index=delta.index,
                text="",
                finish_reason=tally.choices[delta.index].finish_reason,
                stop_reason=delta.stop_reason(self._body.stop_token_ids),
            )
            made.append(self._answer([end], usage))
        return made

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """See `Writer`: the usage, if it was asked for."""
        return [self._answer([], tally.usage)] if self._usage.is_last_asked else []

    def failed(self, error: APIError) -> list[msgspec.Struct]:
        """See `Writer`."""
        return [ErrorBody(error.details)]

    def whole(self, tally: Tally) -> CompletionAnswer:
        """See `Writer`."""
        width = self._asked.request.outputs.num_sequences
        choices = []
        for row in range(len(self._asked.request.rows)):
            described = self._prompts.described(row, tally.prompt_log_probs(row * width))
            choices += [
                self._choice(index, tally.choices[index], described)
                for index in range(row * width, (row + 1) * width)
            ]
        return self._answer(choices, tally.usage)

    def _choice(self, index: int, choice: Choice, described: DescribedPrompt) -> CompletionChoice:
        assert choice.last is not None
        log_probs = described.echoed
        if self._log_probs and not self._asked.drops_tokens:
            new = self._log_probs[index].of(choice.token_ids, choice.log_probs, choice.last.output)
            log_probs = new if log_probs is None else joined(log_probs, new)
        return CompletionChoice(
            index=index,
            text=self._prompts.text(index) + choice.text,
            logprobs=log_probs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.last.stop_reason(self._body.stop_token_ids),
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
            prompt_token_ids=self._prompt_ids(index),
            prompt_logprobs=described.listed,
        )

    def _answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id, created=self._created, model=self._body.model, choices=choices, usage=usage
        )

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return self._prompts.row(index).prompt_token_ids if self._body.return_token_ids else UNSET


def _added_call(call: CallDelta) -> DeltaToolCall:
    function = AddedFunction(name=call.name or UNSET, arguments=call.arguments)
    if not call.name:
        return DeltaToolCall(index=call.index, function=function)
    return DeltaToolCall(index=call.index, id=call.call_id, type="function", function=function)


def _log_prob_writer(asked: AskedGeneration, table: TokenTable, as_ids: bool | None) -> LogProbWriter | None:
    if asked.num_log_probs is None:
        return None
    return LogProbWriter(table, asked.num_log_probs, bool(as_ids))
