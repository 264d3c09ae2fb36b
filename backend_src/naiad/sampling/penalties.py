"""Penalties on tokens that have occurred, and biases."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import torch
from torch import Tensor

from naiad.sampling.param_tensors import ById, bias_tensors
from naiad.sampling.sampled_row import SampledRow
from naiad.sequence import SamplingParams


class LogitBias:
    """Adds the values of `logit_bias`."""

    reads_tokens = False

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there are any."""
        return bool(params.logit_bias)

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Add, in place."""
        for index, row in rows.items():
            token_ids, values = bias_tensors(ById(row.params.logit_bias), logits.device)
            logits[index, token_ids] += values


class RepetitionPenalty:
    """Each token of prompt and output: divide a positive logit, multiply a negative one.

    As in transformers.
    """

    reads_tokens = True

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether it is on."""
        return params.repetition_penalty != 1

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Penalize, in place; an id that occurs twice is written twice, with the same value."""
        row_indices, token_ids = _places(logits, {index: row.token_ids for index, row in rows.items()})
        penalty = _of_rows(logits, {index: row.params.repetition_penalty for index, row in rows.items()})
        penalty = penalty[row_indices]
        values = logits[row_indices, token_ids]
        logits[row_indices, token_ids] = torch.where(values > 0, values / penalty, values * penalty)


class CountPenalties:
    """Each token of the output: subtract once for presence and per occurrence for frequency."""

    reads_tokens = True

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether one of them is on."""
        return params.presence_penalty != 0 or params.frequency_penalty != 0

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Subtract, in place."""
        row_indices, token_ids = _places(logits, {index: row.output_token_ids for index, row in rows.items()})
        vocab_size = logits.shape[1]
        flat, counts = torch.unique(row_indices * vocab_size + token_ids, return_counts=True)
        row_indices, token_ids = flat // vocab_size, flat % vocab_size
        presence = _of_rows(logits, {index: row.params.presence_penalty for index, row in rows.items()})
        frequency = _of_rows(logits, {index: row.params.frequency_penalty for index, row in rows.items()})
        logits[row_indices, token_ids] -= presence[row_indices] + frequency[row_indices] * counts


def _of_rows(logits: Tensor, values: Mapping[int, float]) -> Tensor:
    """[num_rows] of the logits' dtype: each row's value, undefined for rows that have none."""
    result = torch.zeros(logits.shape[0], dtype=logits.dtype)
    result[list(values)] = torch.tensor(list(values.values()), dtype=logits.dtype)
    return result.to(logits.device)


def _places(logits: Tensor, tokens: Mapping[int, list[int]]) -> tuple[Tensor, Tensor]:
    """Row index and token id of every token, int64 each."""
    # Contexts are long, and an array takes a list in an eighth of the time a tensor needs.
    flat = array("q")
    for ids in tokens.values():
        flat.fromlist(ids)
    lengths = torch.tensor([len(ids) for ids in tokens.values()])
    row_indices = torch.tensor(list(tokens)).repeat_interleave(lengths)
    token_ids = torch.frombuffer(flat, dtype=torch.int64) if flat else torch.empty(0, dtype=torch.int64)
    return row_indices.to(logits.device), token_ids.to(logits.device)
