"""Changes to logits that depend on the tokens so far. Rows that ask for none are not touched."""

from __future__ import annotations

import torch
from torch import Tensor

from naiad.sequence import Sequence


def apply_penalties(logits: Tensor, rows: list[Sequence]) -> None:
    """Apply repetition, then frequency and presence penalties, in place.

    Args:
        logits: [num_rows, vocab_size] float32.
        rows: the sequence of each row.
    """
    repeating = [index for index, row in enumerate(rows) if row.params.repetition_penalty != 1]
    if repeating:
        _apply_repetition(logits, rows, repeating)
    counting = [
        index
        for index, row in enumerate(rows)
        if (row.params.presence_penalty or row.params.frequency_penalty) and row.num_output_tokens
    ]
    if counting:
        _apply_counts(logits, rows, counting)


def mask_stop_tokens(logits: Tensor, rows: list[Sequence]) -> None:
    """Make the stop ids of rows that are shorter than their `min_tokens` impossible, in place."""
    places = [
        (index, token_id)
        for index, row in enumerate(rows)
        if row.num_output_tokens < row.params.min_tokens
        for token_id in row.params.stop_token_ids
        if 0 <= token_id < logits.shape[1]
    ]
    if places:
        row_indices, token_ids = torch.tensor(places, device=logits.device).unbind(1)
        logits[row_indices, token_ids] = float("-inf")


def _apply_repetition(logits: Tensor, rows: list[Sequence], indices: list[int]) -> None:
    """Each token of prompt and output: divide a positive logit, multiply a negative one.

    As in transformers. An id that occurs twice is written twice, with the same value.
    """
    row_indices, token_ids = _places(logits, [(index, rows[index].token_ids) for index in indices])
    penalties = torch.ones(len(rows), dtype=logits.dtype)
    penalties[indices] = torch.tensor(
        [rows[i].params.repetition_penalty for i in indices], dtype=logits.dtype
    )
    penalty = penalties.to(logits.device)[row_indices]
    values = logits[row_indices, token_ids]
    logits[row_indices, token_ids] = torch.where(values > 0, values / penalty, values * penalty)


def _apply_counts(logits: Tensor, rows: list[Sequence], indices: list[int]) -> None:
    """Each token of the output: subtract once for presence and per occurrence for frequency."""
    row_indices, token_ids = _places(logits, [(index, rows[index].output_token_ids) for index in indices])
    vocab_size = logits.shape[1]
    flat, counts = torch.unique(row_indices * vocab_size + token_ids, return_counts=True)
    row_indices, token_ids = flat // vocab_size, flat % vocab_size
    params = [row.params for row in rows]
    presence = torch.tensor([p.presence_penalty for p in params], dtype=logits.dtype).to(logits.device)
    frequency = torch.tensor([p.frequency_penalty for p in params], dtype=logits.dtype).to(logits.device)
    logits[row_indices, token_ids] -= presence[row_indices] + frequency[row_indices] * counts


def _places(logits: Tensor, tokens: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    """Row index and token id of every token, int64 each."""
    row_indices = torch.tensor([index for index, _ in tokens])
    lengths = torch.tensor([len(token_ids) for _, token_ids in tokens])
    token_ids = torch.tensor([token_id for _, ids in tokens for token_id in ids])
    return row_indices.repeat_interleave(lengths).to(logits.device), token_ids.to(logits.device)
