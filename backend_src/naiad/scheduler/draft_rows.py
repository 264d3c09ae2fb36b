"""Rows that go on into drafts."""

from __future__ import annotations

from dataclasses import replace

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.outputs import ScheduledSequence
from naiad.scheduler.step_budget import StepBudget
from naiad.scheduler.tenants import Tenants
from naiad.sequence import Sequence
from naiad.speculation.speculator import Speculator


def add_drafts(
    speculator: Speculator,
    kv_cache: KVCacheManager,
    tenants: Tenants,
    budget: StepBudget,
    rows: list[ScheduledSequence],
) -> None:
    """Let rows that reach the last known token go on into drafts, with what is left of the step.

    Drafts take free blocks, but nobody is preempted for them. Beams have none: they choose among
    many next tokens.

    Args:
        speculator: makes the drafts.
        kv_cache: gives the blocks.
        tenants: drafts count as served.
        budget: the step's.
        rows: the step's; some are replaced.
    """
    if budget.is_spent:
        return
    places = [
        place
        for place, row in enumerate(rows)
        if row.samples and not row.sequence.params.num_candidates and speculator.may_draft(row.sequence)
    ]
    if not places:
        return
    sequences = [rows[place].sequence for place in places]
    # One token comes out beside those that are accepted.
    num_left = [each.params.max_tokens - each.num_output_tokens - 1 for each in sequences]
    num_step_tokens = sum(row.num_scheduled_tokens for row in rows)
    drafts = speculator.drafts(sequences, num_left, budget.num_drafts_left, num_step_tokens)
    for place, sequence, draft in zip(places, sequences, drafts, strict=True):
        kept: list[int] = []
        if draft:
            num_tokens = sequence.num_tokens
            num_held = kv_cache.extend(sequence, num_tokens + len(draft)) - num_tokens
            kept = draft[: budget.take_drafts(num_tokens, num_held)]
        if kept:
            tenants.of(sequence).num_served_tokens += len(kept)
            row = rows[place]
            num_scheduled_tokens = row.num_scheduled_tokens + len(kept)
            rows[place] = replace(row, num_scheduled_tokens=num_scheduled_tokens, draft_token_ids=tuple(kept))
        else:
            # A model that drafts may have taken blocks for drafts it did not get to.
            kv_cache.trim(sequence)


def drop_behind(speculator: Speculator | None, sequence: Sequence, num_tokens: int, num_new: int) -> None:
    """Forget what a sequence that ends has behind its end; drafts there were not accepted.

    Args:
        speculator: the scheduler's.
        sequence: the one; to be removed next.
        num_tokens: known tokens up to the end.
        num_new: known tokens that the last step has brought.
    """
    num_dropped = sequence.num_tokens - num_tokens
    if num_dropped:
        del sequence.token_ids[num_tokens:]
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens)
        if speculator is not None:
            speculator.dropped(sequence, max(0, num_new - num_dropped), num_new - 1)
