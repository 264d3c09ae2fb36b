"""Checking drafts: the target samples at every position, and drafts count while it agrees.

Whatever made a draft, it is a guess at the one token that the target draws at that place with the
sequence's own noise, which depends on seed, position and token id alone. So what comes out is
token for token what comes out without drafts, under every setting: each position goes through the
whole sampler with the tokens before it as if they had been sampled one by one. A draft is accepted
with the probability that the target gives it, or, drawn from a distribution of its own with the same
noise, with that of the Gumbel coupling (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from naiad.outputs import ModelOutput, StepRow
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler_output import SamplerOutput


def sampled_views(rows: Iterable[tuple[StepRow, RowState]]) -> list[list[RowState]]:
    """Of each row the states to sample for: as it is, and as if its first 1, 2, … drafts were known.

    Those of rows with drafts have ids of their own, which are negative.
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
    """Keep of each row the accepted drafts and the token behind them.

    Args:
        rows: all sample.
        views: from `sampled_views`.
        sampled: what was sampled for the views.
        failed: sequence ids that get nothing.

    Returns:
        For each row one token more than were accepted. A view that failed ends its row's tokens,
        if there are any: the row will fail in the next step, when its turn has come.
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
    """The ids of the first view and of those all of whose drafts were sampled."""
    kept = [views[0].sequence_id]
    for draft, view in zip(drafts, views[1:], strict=True):
        if sampled.sampled_token_ids[kept[-1]] != draft or view.sequence_id in sampled.errors:
            break
        kept.append(view.sequence_id)
    return kept
