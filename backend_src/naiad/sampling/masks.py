"""Tokens that are impossible for a row: their logits become -inf, and nothing lifts that again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from naiad.sampling.param_tensors import ById, excluded_mask
from naiad.sampling.row_state import RowState, TokenState
from naiad.sequence import SamplingParams
from naiad_kernels.staging import Staging


class LastTokens:
    """The last few known tokens of a row.

    Attributes:
        token_ids: at most so many as were asked for.
    """

    __slots__ = ("_num", "token_ids")

    def __init__(self, num: int) -> None:
        """Know none, and keep `num` at most."""
        self._num = num
        self.token_ids: list[int] = []

    def advance(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """See `TokenState`."""
        if self._num:
            self.token_ids = [*self.token_ids, *token_ids[-self._num :]][-self._num :]

    def clone(self) -> LastTokens:
        """See `TokenState`."""
        other = LastTokens(self._num)
        other.token_ids = self.token_ids
        return other


class BadWords:
    """The last id of a bad word is impossible where the known tokens end with the ids before it.

    As in transformers: the word may begin in the prompt.
    """

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there are any."""
        return bool(params.bad_words)

    def new_state(self, params: SamplingParams) -> TokenState:
        """As many of the last tokens as the longest word has before its last."""
        return LastTokens(max(len(word) for word in params.bad_words) - 1)

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        last = {index: cast(LastTokens, row.states[self]).token_ids for index, row in rows.items()}
        excluded = {index: _completing(row.params.bad_words, last[index]) for index, row in rows.items()}
        _exclude(logits, excluded)


class MinTokens:
    """The stop ids are impossible until there are `min_tokens` new tokens."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether both are set."""
        return params.min_tokens > 0 and bool(params.stop_token_ids)

    def new_state(self, params: SamplingParams) -> None:
        """None: only the number of tokens matters."""

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        short = {i: row for i, row in rows.items() if row.num_output_tokens < row.params.min_tokens}
        _exclude(logits, {index: row.params.stop_token_ids for index, row in short.items()})


class AllowedTokens:
    """Only `allowed_token_ids` are possible."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there are any."""
        return bool(params.allowed_token_ids)

    def new_state(self, params: SamplingParams) -> None:
        """None: tokens do not matter."""

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        for index, row in rows.items():
            mask = excluded_mask(ById(row.params.allowed_token_ids), logits.shape[1], logits.device)
            logits[index].masked_fill_(mask, float("-inf"))


def _completing(words: Iterable[tuple[int, ...]], last: list[int]) -> Iterable[int]:
    """The ids with which the next token would complete a word, after these last tokens."""
    for word in words:
        prefix = word[:-1]
        # The last id of the prefix decides nearly always: no slice is made for it.
        if not prefix or (last[-1] == prefix[-1] and tuple(last[-len(prefix) :]) == prefix):
            yield word[-1]


def _exclude(logits: Tensor, excluded: Mapping[int, Iterable[int]]) -> None:
    """Mask ids of rows; those outside of the vocabulary mask nothing."""
    vocab_size = logits.shape[1]
    places = [(index, i) for index, token_ids in excluded.items() for i in token_ids if 0 <= i < vocab_size]
    if places:
        staging = Staging(Staging.bytes_for([len(places)] * 2, []), logits.device)
        row_indices = staging.put([index for index, _ in places], torch.int64)
        token_ids = staging.put([token_id for _, token_id in places], torch.int64)
        staging.send()
        # A tensor of the device's: a number in its place would be copied there, and waited for.
        excluded_logit = torch.full((), float("-inf"), device=logits.device)
        logits.index_put_((row_indices, token_ids), excluded_logit)
