"""What beams choose from: the best tokens of a row and their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from naiad.sampling.raw_logits import best_token_ids
from naiad.sampling.sampled_row import SampledRow
from naiad.sampling.sampler_output import SamplerOutput


def normalize(logits: Tensor, indices: list[int]) -> None:
    """Make logits log-probabilities, in place: processors change those of beams, as in transformers.

    Args:
        logits: [num_rows, vocab_size] float32.
        indices: of the beams' rows.
    """
    if indices:
        index = torch.tensor(indices, device=logits.device)
        logits[index] = logits[index].log_softmax(dim=1)


def add_candidates(
    logits: Tensor, rows: Sequence[SampledRow], indices: list[int], output: SamplerOutput
) -> None:
    """Replace the beams' sampled ids by their candidates: the best of the possible tokens.

    Args:
        logits: [num_rows, vocab_size] float32, processed.
        rows: the sequence of each row.
        indices: of the beams' rows.
        output: beams that failed, or have no possible token, have no id in it.
    """
    kept = [index for index in indices if rows[index].sequence_id in output.sampled_token_ids]
    if not kept:
        return
    chosen = logits[torch.tensor(kept, device=logits.device)]
    num = min(max(rows[index].params.num_candidates for index in kept), chosen.shape[1])
    token_ids = best_token_ids(chosen, num)
    log_probs = chosen.gather(1, token_ids)
    for index, ids, their_log_probs in zip(kept, token_ids.tolist(), log_probs.tolist(), strict=True):
        sequence_id = rows[index].sequence_id
        wanted = rows[index].params.num_candidates
        del output.sampled_token_ids[sequence_id]
        candidates = list(zip(ids, their_log_probs, strict=True))[:wanted]
        output.candidates[sequence_id] = [each for each in candidates if each[1] > -math.inf]
