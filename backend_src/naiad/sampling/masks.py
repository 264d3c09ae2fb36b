"""Logits processors that make tokens impossible: their logits become -inf and stay so."""

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
        token_ids: at most `num` ids, in order.
    """

    __slots__ = ("_num", "token_ids")

    def __init__(self, num: int) -> None:
        """Start without tokens; keep at most `num`."""
        self._num = num
        self.token_ids: list[int] = []

    def advance(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """Add the next known tokens, as `TokenState` requires."""
        if self._num:
            self.token_ids = [*self.token_ids, *token_ids[-self._num :]][-self._num :]

    def clone(self) -> LastTokens:
        """Return an equal state that advances on its own."""
        other = LastTokens(self._num)
        other.token_ids = self.token_ids
        return other


class BadWords:
    """Masks the last id of a bad word where the known tokens end with the ids before it.

    As in transformers, the word may begin in the prompt.
    """

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there are bad words."""
        return bool(params.bad_words)

    def new_state(self, params: SamplingParams) -> TokenState:
        """Keep as many last tokens as the longest word has before its last id."""
        return LastTokens(max(len(word) for word in params.bad_words) - 1)

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        last = {index: cast(LastTokens, row.states[self]).token_ids for index, row in rows.items()}
        excluded = {index: _completing(row.params.bad_words, last[index]) for index, row in rows.items()}
        _exclude(logits, excluded)


class MinTokens:
    """Masks the stop ids until there are `min_tokens` new tokens."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether both are set; a grammar's mask excludes these ids itself, as its end goes first."""
        return params.min_tokens > 0 and bool(params.stop_token_ids) and params.grammar is None

    def new_state(self, params: SamplingParams) -> None:
        """Return None: only the number of tokens matters."""

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        short = {i: row for i, row in rows.items() if row.num_output_tokens < row.params.min_tokens}
        _exclude(logits, {index: row.params.stop_token_ids for index, row in short.items()})


class AllowedTokens:
    """Masks all ids except `allowed_token_ids`."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether the ids are restricted."""
        return bool(params.allowed_token_ids)

    def new_state(self, params: SamplingParams) -> None:
        """Return None: no state is needed."""

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        for index, row in rows.items():
            mask = excluded_mask(ById(row.params.allowed_token_ids), logits.shape[1], logits.device)
            logits[index].masked_fill_(mask, float("-inf"))


def _completing(words: Iterable[tuple[int, ...]], last: list[int]) -> Iterable[int]:
    """The ids that would complete one of the words after these last tokens."""
    for word in words:
        prefix = word[:-1]
        # Comparing the prefix's last id first nearly always avoids the slice.
        if not prefix or (last[-1] == prefix[-1] and tuple(last[-len(prefix) :]) == prefix):
            yield word[-1]


def _exclude(logits: Tensor, excluded: Mapping[int, Iterable[int]]) -> None:
    """Mask ids of rows; ids outside the vocabulary are ignored."""
    vocab_size = logits.shape[1]
    places = [(index, i) for index, token_ids in excluded.items() for i in token_ids if 0 <= i < vocab_size]
    if places:
        staging = Staging(Staging.bytes_for([len(places)] * 2, []), logits.device)
        row_indices = staging.put([index for index, _ in places], torch.int64)
        token_ids = staging.put([token_id for _, token_id in places], torch.int64)
        staging.send()
        # A tensor on the device: a Python number would be copied there, which makes the host wait.
        excluded_logit = torch.full((), float("-inf"), device=logits.device)
        logits.index_put_((row_indices, token_ids), excluded_logit)
