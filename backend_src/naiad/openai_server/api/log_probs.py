"""Log-probabilities in the forms of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naiad.openai_server.api.answers import (
    BestToken,
    ChatLogProbs,
    ChatToken,
    CompletionLogProbs,
    PromptLogProbs,
    PromptToken,
)
from naiad.outputs import TokenLogProbs
from naiad.tokenization import TokenTable

# JSON has no infinity; the log-probability of a token that can not come.
_LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class LogProbWriter:
    """Writes the log-probabilities of tokens.

    Attributes:
        table: the checkpoint's tokens.
        num_best: number of best tokens at each position.
        as_ids: tokens are written as "token_id:N".
    """

    table: TokenTable
    num_best: int
    as_ids: bool = False

    def chat(self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs]) -> ChatLogProbs:
        """The form of a chat."""
        return ChatLogProbs(
            [self._chat_token(token_id, each) for token_id, each in zip(token_ids, log_probs, strict=True)]
        )

    def completion(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[TokenLogProbs | None],
        text_offset: list[int],
    ) -> CompletionLogProbs:
        """The form of a completion.

        Args:
            token_ids: the tokens.
            log_probs: their log-probabilities; None for a token that nothing precedes.
            text_offset: where each of them begins in the choice's text.
        """
        tokens = [self.token(token_id) for token_id in token_ids]
        return CompletionLogProbs(
            tokens=tokens,
            token_logprobs=[None if each is None else _finite(each.log_prob) for each in log_probs],
            top_logprobs=[self._best(token, each) for token, each in zip(tokens, log_probs, strict=True)],
            text_offset=text_offset,
        )

    def prompt(self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs | None]) -> PromptLogProbs:
        """The form of `prompt_logprobs`; the arguments are those of `completion`."""
        return [
            None if each is None else self._prompt_tokens(token_id, each)
            for token_id, each in zip(token_ids, log_probs, strict=True)
        ]

    def token(self, token_id: int) -> str:
        """The token as text."""
        if self.as_ids:
            return f"token_id:{token_id}"
        return self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._bytes(token_id).decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        return self.table.visible_bytes(token_id, skip_special_tokens=False)

    def _chat_token(self, token_id: int, each: TokenLogProbs) -> ChatToken:
        best = zip(each.top_token_ids[: self.num_best], each.top_log_probs, strict=False)
        return ChatToken(
            self.token(token_id),
            _finite(each.log_prob),
            list(self._bytes(token_id)),
            [BestToken(self.token(top), _finite(value), list(self._bytes(top))) for top, value in best],
        )

    def _best(self, token: str, each: TokenLogProbs | None) -> dict[str, float] | None:
        """The best tokens and the token itself, which need not be one of them."""
        if each is None:
            return None
        found: dict[str, float] = {}
        for top, value in zip(each.top_token_ids[: self.num_best], each.top_log_probs, strict=False):
            # Several tokens may have the same text, such as parts of characters: the best one counts.
            found.setdefault(self.token(top), _finite(value))
        found.setdefault(token, _finite(each.log_prob))
        return found

    def _prompt_tokens(self, token_id: int, each: TokenLogProbs) -> dict[int, PromptToken]:
        """The prompt's own token, then the best ones."""
        found = {token_id: PromptToken(_finite(each.log_prob), each.rank, self._text(token_id))}
        best = zip(each.top_token_ids[: self.num_best], each.top_log_probs, strict=False)
        for rank, (top, value) in enumerate(best, start=1):
            if top != token_id:
                found[top] = PromptToken(_finite(value), rank, self._text(top))
        return found


def with_first(token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs]) -> list[TokenLogProbs | None]:
    """One entry for each prompt token: None for the first, and for all if none have been computed."""
    return [None, *log_probs] if log_probs else [None] * len(token_ids)


def _finite(log_prob: float) -> float:
    return max(log_prob, _LEAST)
