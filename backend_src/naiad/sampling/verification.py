"""Verifies drafts: the target samples at every position, and drafts are accepted while they agree.

However a draft token was made, it is a guess at the one token that the target draws at that position
with the sequence's own noise, which depends on seed, position and token id alone. So the output is
token for token the same as without drafts, with all sampling parameters: each position goes through
the whole sampler as if the tokens before it had been sampled one by one. A draft token that does not
depend on the noise is accepted with the probability that the target gives it; one that was drawn from
a draft distribution with the same noise, with that of the Gumbel coupling (Daliri, Musco, Suresh,
arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from naiad.outputs import ModelOutput, StepRow
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler_output import SamplerOutput


def sampled_views(rows: Iterable[tuple[StepRow, RowState]]) -> list[list[RowState]]:
    """The states to sample from in each row: the row's own, and those after its first 1, 2, … drafts.

    For rows with drafts these are copies with negative ids.
    """
    views: list[list[RowState]] = []
    next_id = -1
    for row, state in rows:
        drafts = row.draft_token_ids
        if not drafts:
            views.append([state])
            continue
        places = [state.at(next_id, ())]
        for number, draft in enumerate(drafts, start=1):
            places.append(places[-1].at(next_id - number, (draft,)))
        views.append(places)
        next_id -= len(places)
    return views


def verify(
    rows: Iterable[StepRow],
    views: Iterable[list[RowState]],
    sampled: SamplerOutput,
    failed: Container[int] = (),
) -> ModelOutput:
    """Keep each row's accepted drafts and the token after them.

    Args:
        rows: the rows that sample.
        views: the rows' views from `sampled_views`.
        sampled: the sampler's output for the views.
        failed: ids of sequences that get no output.

    Returns:
        For each row one token more than drafts were accepted. If a view after the first has failed, the
        row's tokens end before it; the row will fail in a later step, when that position is its next.
    """
    output = ModelOutput({})
    for row, row_views in zip(rows, views, strict=True):
        sequence_id, first_id = row.sequence_id, row_views[0].sequence_id
        if sequence_id in failed:
            continue
        if first_id in sampled.candidates:
            output.candidates[sequence_id] = sampled.candidates[first_id]
        elif first_id in sampled.errors:
            output.errors[sequence_id] = sampled.errors[first_id]
        elif first_id in sampled.sampled_token_ids:
            kept = _agreed(row.draft_token_ids, row_views, sampled)
            output.sampled_token_ids[sequence_id] = [sampled.sampled_token_ids[each] for each in kept]
            if first_id in sampled.log_probs:
                output.log_probs[sequence_id] = [sampled.log_probs[each] for each in kept]
            if first_id in sampled.generation_logits:
                output.generation_logits[sequence_id] = [sampled.generation_logits[each] for each in kept]
    return output


def _agreed(drafts: tuple[int, ...], views: list[RowState], sampled: SamplerOutput) -> list[int]:
    """The ids of the first view and of the views after accepted drafts."""
    kept = [views[0].sequence_id]
    for draft, view in zip(drafts, views[1:], strict=True):
        if sampled.sampled_token_ids[kept[-1]] != draft or view.sequence_id in sampled.errors:
            break
        kept.append(view.sequence_id)
    return kept
