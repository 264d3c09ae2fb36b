"""What a generation has made so far: the choices, and the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from naiad.frontend.request import GenerateRequest
from naiad.openai_server.api.answers import CachedTokens, PredictedTokens, Usage
from naiad.openai_server.api.parsing.pieces import ContentPart, ContentPlace, ParsedDelta, in_order
from naiad.outputs import RequestOutput, TokenLogProbs
from naiad.sequence import FinishReason

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TIMEOUT: "length"}


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What a step adds to one sequence.

    Attributes:
        index: the choice that it belongs to; choices are counted prompt by prompt.
        text: the new text.
        output: the engine's output.
        parsed: the text taken apart; None: all of it is content.
    """

    index: int
    text: str
    output: RequestOutput
    parsed: ParsedDelta | None = None

    @property
    def parts(self) -> ParsedDelta:
        """The parts of the new text."""
        if self.parsed is not None:
            return self.parsed
        return ParsedDelta("", self.text, self.output.token_ids, self.output.log_probs)

    @property
    def is_last(self) -> bool:
        """Whether the sequence has ended."""
        return self.output.finish_reason is not None

    def stop_reason(self, stop_token_ids: list[int] | None) -> str | int | None:
        """The stop string or the client's own stop id that ended the text; "timeout"; else None.

        Args:
            stop_token_ids: the ids that the client named.
        """
        output = self.output
        if output.finish_reason is FinishReason.TIMEOUT:
            return "timeout"
        if output.is_cut:
            return output.stop_reason
        if output.stop_reason.isdigit() and int(output.stop_reason) in (stop_token_ids or ()):
            return int(output.stop_reason)
        return None


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, as far as it has come.

    Attributes:
        after: what of the content comes before it.
        arguments: a JSON object as text.
    """

    call_id: str
    name: str
    after: ContentPlace
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One sequence, from its first token to its last.

    Attributes:
        num_calls: number of calls of tools.
        calls: the calls, if the deltas are kept.
        text: the content.
        reasoning: what comes before the content.
        token_ids: all tokens.
        content_ids, log_probs: the content's tokens, and their log-probabilities.
        last: its last delta.
    """

    num_calls: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    content_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    last: SequenceDelta | None = None

    @property
    def finish_reason(self) -> str:
        """Why it has ended, in OpenAI's words: a passed deadline is a length.

        It is a stop if a call is not complete, so that nobody takes it for a call.
        """
        assert self.last is not None
        assert self.last.output.finish_reason is not None
        reason = _REASONS[self.last.output.finish_reason]
        has_called = self.num_calls > 0 and not self.has_open_call
        return "tool_calls" if reason == "stop" and has_called else reason

    @property
    def has_open_call(self) -> bool:
        """Whether it has ended within a call: a stop string or id may stand in the arguments."""
        return self.last is not None and self.last.parts.has_open_call

    def in_order(self) -> Iterator[ContentPart | ToolCall]:
        """Yield the content and the calls, if the deltas are kept, in the order in which they came."""
        return in_order(self.text, self.content_ids, self.log_probs, self.calls)


class Tally:
    """Adds up the deltas of a generation."""

    def __init__(self, request: GenerateRequest, *, drops_tokens: bool = False) -> None:
        """Start without tokens; `drops_tokens`: the new tokens are not part of the answer."""
        self._request = request
        self._drops_tokens = drops_tokens
        self.choices = [Choice() for _ in range(request.num_sequences)]
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._cached = [0] * len(request.rows)
        self._prompt_log_probs: dict[int, list[TokenLogProbs]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has ended."""
        return all(choice.last is not None for choice in self.choices)

    @property
    def describes_tokens(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self._request.outputs.log_probs or self._request.outputs.num_prompt_log_probs >= 0

    def prompt_log_probs(self, index: int) -> list[TokenLogProbs]:
        """What `keep` has kept of the log-probabilities of this choice's prompt; see `RequestOutput`."""
        return self._prompt_log_probs.get(self._row(index), [])

    def _row(self, index: int) -> int:
        return index // self._request.outputs.num_sequences

    def take(self, delta: SequenceDelta) -> None:
        """Count a delta's tokens."""
        choice, output = self.choices[delta.index], delta.output
        row = self._row(delta.index)
        self._cached[row] = max(self._cached[row], output.num_cached_tokens)
        if not self._drops_tokens:
            self._num_tokens += len(output.token_ids)
            self._num_reasoning_tokens += delta.parsed.num_reasoning_tokens if delta.parsed else 0
            choice.num_calls += sum(1 for call in delta.parts.calls if call.name)
        if delta.is_last:
            choice.last = delta

    def keep(self, delta: SequenceDelta) -> None:
        """Count a delta's tokens, and keep its content for an answer in one piece."""
        self.take(delta)
        if delta.output.prompt_log_probs:
            self._prompt_log_probs[self._row(delta.index)] = delta.output.prompt_log_probs
        if self._drops_tokens:
            return
        choice, parts = self.choices[delta.index], delta.parts
        for call in parts.calls:
            if call.name:
                place = ContentPlace(
                    len(choice.text) + call.after.num_chars,
                    len(choice.content_ids) + call.after.num_tokens,
                )
                choice.calls.append(ToolCall(call.call_id, call.name, place))
            choice.calls[-1].arguments += call.arguments
        choice.text += parts.content
        choice.reasoning += parts.reasoning
        choice.token_ids += delta.output.token_ids
        choice.content_ids += parts.content_ids
        choice.log_probs += parts.content_log_probs

    @property
    def usage(self) -> Usage:
        """The number of tokens so far."""
        ended = [choice.last.output for choice in self.choices if choice.last is not None]
        num_prompt_tokens = self._request.num_prompt_tokens
        num_accepted = sum(output.num_accepted_tokens for output in ended)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=num_prompt_tokens + self._num_tokens,
            prompt_tokens_details=CachedTokens(sum(self._cached)),
            completion_tokens_details=PredictedTokens(
                accepted_prediction_tokens=num_accepted,
                rejected_prediction_tokens=sum(output.num_draft_tokens for output in ended) - num_accepted,
                reasoning_tokens=self._num_reasoning_tokens,
            ),
        )
