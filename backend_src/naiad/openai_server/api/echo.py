"""Prompts in the answers to completions: echoed, and with the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from naiad.frontend.request import RequestRow
from naiad.openai_server.api.answers import CompletionLogProbs, PromptLogProbs
from naiad.openai_server.api.bodies import CompletionBody
from naiad.openai_server.api.log_probs import LogProbWriter, with_first
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.api.text_offsets import TextOffsets, prompt_offsets
from naiad.outputs import RequestOutput, TokenLogProbs
from naiad.tokenization import TokenTable


@dataclass(frozen=True, slots=True)
class DescribedPrompt:
    """What an answer says of a prompt's tokens.

    Attributes:
        echoed: the beginning of each choice's `logprobs`.
        listed: `prompt_logprobs`.
    """

    echoed: CompletionLogProbs | None
    listed: PromptLogProbs | UnsetType


class EchoedPrompts:
    """The prompts of a completion; choices are counted prompt by prompt."""

    def __init__(self, body: CompletionBody, asked: AskedGeneration, table: TokenTable) -> None:
        """Set up; `table` holds the tokens of the model that answers."""
        self._body = body
        self._asked = asked
        self._table = table

    @property
    def are_described(self) -> bool:
        """Whether something is said of their tokens."""
        return self._asked.request.outputs.num_prompt_log_probs >= 0

    @property
    def are_sent(self) -> bool:
        """Whether they are echoed or described."""
        return bool(self._asked.echoes) or self.are_described

    def row_index(self, choice: int) -> int:
        """Which prompt a choice continues."""
        return choice // self._asked.request.outputs.num_sequences

    def row(self, choice: int) -> RequestRow:
        """The row of the prompt that a choice continues."""
        return self._asked.request.rows[self.row_index(choice)]

    def text(self, choice: int) -> str:
        """The text that a choice begins with."""
        return self._asked.echoes[self.row_index(choice)] if self._asked.echoes else ""

    def described(self, row: int, log_probs: Sequence[TokenLogProbs]) -> DescribedPrompt:
        """Describe a prompt.

        Args:
            row: the index of its row.
            log_probs: one for each token but the first; empty if it ended before they were computed.
        """
        body, asked = self._body, self._asked
        token_ids = asked.request.rows[row].prompt_token_ids
        all_log_probs = with_first(token_ids, log_probs)
        echoed = None
        if asked.echoes and asked.num_log_probs is not None:
            writer = LogProbWriter(self._table, asked.num_log_probs, bool(body.return_tokens_as_token_ids))
            places = prompt_offsets(self._table, token_ids, asked.echoes[row])
            echoed = writer.completion(token_ids, all_log_probs, places)
        listed: PromptLogProbs | UnsetType = UNSET
        if body.prompt_logprobs is not None:
            listed = LogProbWriter(self._table, body.prompt_logprobs).prompt(token_ids, all_log_probs)
        return DescribedPrompt(echoed, listed)


class ChoiceLogProbs:
    """The log-probabilities of the new tokens of one choice."""

    def __init__(self, writer: LogProbWriter, row: RequestRow, echo: str, has_end: bool) -> None:
        """Begin after the prompt.

        Args:
            writer: writes them.
            row: the row of the choice's prompt.
            echo: the text that the choice begins with.
            has_end: the id that ends the text is one of the tokens; those who measure prompts by an echo
                expect one more token than the prompt has, whatever the model says next.
        """
        assert row.text is not None
        self._writer = writer
        self._has_end = has_end
        self._places = TextOffsets(
            writer.table,
            row.text.prompt_tail_ids,
            skip_special_tokens=row.text.skip_special_tokens,
            start=len(echo),
        )

    def of(
        self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs], last: RequestOutput
    ) -> CompletionLogProbs:
        """Describe the next tokens; `last` is the output that holds the last of them."""
        ids, all_log_probs = list(token_ids), list(log_probs)
        if self._has_end and last.end_log_probs is not None:
            ids.append(int(last.stop_reason))
            all_log_probs.append(last.end_log_probs)
        return self._writer.completion(ids, all_log_probs, self._places.of(ids))


def joined(first: CompletionLogProbs, second: CompletionLogProbs) -> CompletionLogProbs:
    """Put the second after the first."""
    return CompletionLogProbs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )
