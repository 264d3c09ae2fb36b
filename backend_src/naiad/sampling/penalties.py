"""Logits processors that add biases or penalise tokens that have occurred."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from naiad.sampling.param_tensors import ById, bias_tensors
from naiad.sampling.row_state import RowState, TokenState
from naiad.sequence import SamplingParams


class LogitBias:
    """Adds the values of `logit_bias`."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there are biases."""
        return bool(params.logit_bias)

    def new_state(self, params: SamplingParams) -> None:
        """Return None: no state is needed."""

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Add the biases, in place."""
        for index, row in rows.items():
            token_ids, values = bias_tensors(ById(row.params.logit_bias), logits.device)
            logits[index, token_ids] += values


class TokenCounts:
    """The distinct tokens of a row, in the order of their first occurrence, and their counts.

    Attributes:
        token_ids: each id once.
        counts: the number of occurrences of each id.
    """

    __slots__ = ("_counts_prompt", "_places", "counts", "token_ids")

    def __init__(self, counts_prompt: bool) -> None:
        """Start without tokens.

        Args:
            counts_prompt: whether tokens of the prompt are counted, too.
        """
        self.token_ids = array("q")
        self.counts = array("q")
        self._places: dict[int, int] = {}
        self._counts_prompt = counts_prompt

    def advance(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """Count the next known tokens, as `TokenState` requires."""
        if is_prompt and not self._counts_prompt:
            return
        places, counts = self._places, self.counts
        for token_id in token_ids:
            place = places.get(token_id)
            if place is None:
                places[token_id] = len(counts)
                self.token_ids.append(token_id)
                counts.append(1)
            else:
                counts[place] += 1

    def clone(self) -> TokenCounts:
        """Return an equal state that advances on its own."""
        other = TokenCounts(self._counts_prompt)
        other.token_ids, other.counts = self.token_ids[:], self.counts[:]
        other._places = self._places.copy()
        return other


class RepetitionPenalty:
    """Divides the positive logits of tokens in prompt or output by the penalty; multiplies negative ones.

    As in transformers.
    """

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether it is on."""
        return params.repetition_penalty != 1

    def new_state(self, params: SamplingParams) -> TokenState:
        """Track which tokens have occurred."""
        return TokenCounts(counts_prompt=True)

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Apply the penalties, in place."""
        row_indices, token_ids, _ = _occurrences(logits, {i: row.states[self] for i, row in rows.items()})
        penalty = _of_rows(logits, {index: row.params.repetition_penalty for index, row in rows.items()})
        penalty = penalty[row_indices]
        values = logits[row_indices, token_ids]
        logits[row_indices, token_ids] = torch.where(values > 0, values / penalty, values * penalty)


class CountPenalties:
    """Subtracts the presence penalty once from each output token, the frequency penalty per occurrence."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether one of them is on."""
        return params.presence_penalty != 0 or params.frequency_penalty != 0

    def new_state(self, params: SamplingParams) -> TokenState:
        """Count the occurrences of each output token."""
        return TokenCounts(counts_prompt=False)

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Subtract the penalties, in place."""
        states = {index: row.states[self] for index, row in rows.items()}
        row_indices, token_ids, counts = _occurrences(logits, states)
        presence = _of_rows(logits, {index: row.params.presence_penalty for index, row in rows.items()})
        frequency = _of_rows(logits, {index: row.params.frequency_penalty for index, row in rows.items()})
        logits[row_indices, token_ids] -= presence[row_indices] + frequency[row_indices] * counts


def _of_rows(logits: Tensor, values: Mapping[int, float]) -> Tensor:
    """Return [num_rows] in the logits' dtype: each row's value, arbitrary for rows that have none."""
    result = torch.zeros(logits.shape[0], dtype=logits.dtype)
    result[list(values)] = torch.tensor(list(values.values()), dtype=logits.dtype)
    return result.to(logits.device)


def _occurrences(logits: Tensor, states: Mapping[int, TokenState]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row index, token id and count of every distinct token of every row, int64 each."""
    token_ids, counts = array("q"), array("q")
    lengths = []
    for state in states.values():
        occurred = cast(TokenCounts, state)
        token_ids.extend(occurred.token_ids)
        counts.extend(occurred.counts)
        lengths.append(len(occurred.token_ids))
    row_indices = torch.tensor(list(states)).repeat_interleave(torch.tensor(lengths))
    # An empty array has no memory that a tensor could share.
    tensors = [
        torch.frombuffer(each, dtype=torch.int64) if each else torch.empty(0, dtype=torch.int64)
        for each in (token_ids, counts)
    ]
    return row_indices.to(logits.device), tensors[0].to(logits.device), tensors[1].to(logits.device)
