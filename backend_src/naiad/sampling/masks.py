"""Tokens that are impossible for a row: their logits become -inf, and nothing lifts that again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from naiad.sampling.param_tensors import ById, excluded_mask
from naiad.sampling.sampled_row import SampledRow
from naiad.sequence import SamplingParams
from naiad_kernels.staging import Staging


class BadWords:
    """The last id of a bad word is impossible where the known tokens end with the ids before it.

    As in transformers: the word may begin in the prompt.
    """

    reads_tokens = True

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there are any."""
        return bool(params.bad_words)

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Mask, in place."""
        _exclude(logits, {index: _completing(row) for index, row in rows.items()})


class MinTokens:
    """The stop ids are impossible until there are `min_tokens` new tokens."""

    reads_tokens = False

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether both are set."""
        return params.min_tokens > 0 and bool(params.stop_token_ids)

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Mask, in place."""
        short = {i: row for i, row in rows.items() if row.num_output_tokens < row.params.min_tokens}
        _exclude(logits, {index: row.params.stop_token_ids for index, row in short.items()})


class AllowedTokens:
    """Only `allowed_token_ids` are possible."""

    reads_tokens = False

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there are any."""
        return bool(params.allowed_token_ids)

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Mask, in place."""
        for index, row in rows.items():
            mask = excluded_mask(ById(row.params.allowed_token_ids), logits.shape[1], logits.device)
            logits[index].masked_fill_(mask, float("-inf"))


def _completing(row: SampledRow) -> Iterable[int]:
    """The ids with which the next token would complete a bad word."""
    known = row.token_ids
    for word in row.params.bad_words:
        prefix = word[:-1]
        # The last id of the prefix decides nearly always: no slice is made for it.
        if not prefix or (known[-1] == prefix[-1] and tuple(known[-len(prefix) :]) == prefix):
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
