"""Chooses which running sequences are preempted when slots or blocks run out.

Why every sequence advances. Ranks are fixed, so the live sequences of all tenants have one order;
let s be the first running one. Within a tenant both functions below choose the sequence with the
largest rank first. A tenant's only running sequence is never chosen for another tenant's sequence in
the queue, and for blocks only when no tenant runs more than one, not counting beams that have the
rank of s. So s is preempted for blocks only if it runs alone, and then it fits (`admission`). It is
preempted for the first sequence in the queue only if that outranks it, and because ranks are times,
only finitely many sequences can. So s ends, and then its successor does.

Why little is computed twice. A step that preempts for blocks admits nothing, a sequence is admitted
only with room for all its known tokens, and a preempted one only if one spare block is left for each
running sequence: before it is preempted again, some other sequence has filled a whole block. At most
its own tokens are recomputed, less those that the prefix cache still holds.

Beams of one search wait for each other, and admission accepts only searches that fit the empty cache
and the slots. If all running sequences wait, the smallest rank in the queue preempts larger ranks: it
belongs to the first search, which fits. Beams of one search have the same rank, and beams with the
rank of s are not preempted for other tenants, as s is not. So the first search keeps what it has
until it ends. All other sequences of one request have one rank too, but wait for none of the others,
and give way as if each were a request.
"""

from __future__ import annotations

from typing import Protocol

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.scheduler.policies import SchedulingPolicy, rank_key
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.scheduler.tenants import Tenants
from naiad.scheduler.waiting_queue import WaitingQueue
from naiad.sequence import Sequence


class SchedulerState(Protocol):
    """The state that the choice depends on; `naiad.scheduler.scheduler.Scheduler` implements it."""

    kv_cache: KVCacheManager
    limits: SchedulerLimits
    policy: SchedulingPolicy
    tenants: Tenants
    waiting: WaitingQueue
    running: list[Sequence]


def choose_for_blocks(running: list[Sequence], tenants: Tenants, max_num_seqs: int) -> Sequence:
    """The running sequence that gives up its blocks: the last one of a tenant above its fair share.

    Args:
        running: at least two sequences, by rank.
        tenants: the sequences' tenants.
        max_num_seqs: number of slots.
    """
    if len(tenants) > 1:
        others = [each for each in reversed(running) if not _is_kept(running, each)]
        for num_kept in (tenants.share(max_num_seqs), 1):
            for sequence in others:
                if tenants.of(sequence).num_running > num_kept:
                    return sequence
    return running[-1]


def all_wait(running: list[Sequence]) -> bool:
    """Whether no running sequence can advance: all are beams waiting for others, or about to end."""
    return all(sequence.next_start == sequence.next_end for sequence in running)


def num_spare_blocks(running: list[Sequence], sequence: Sequence, is_stuck: bool) -> int:
    """Number of blocks that must stay free when a sequence is admitted."""
    if sequence.num_preemptions == 0 or is_stuck:
        return 0
    return len(running)


def choose_for_first(state: SchedulerState, first: Sequence) -> list[Sequence]:
    """The running sequences to preempt for the one that is admitted next.

    Within its own tenant these are the ones that the policy allows. If its tenant has less than its
    share of the slots, sequences that other tenants run beyond their shares are added. If no running
    sequence can advance, all with larger ranks may be preempted.

    Returns:
        The fewest that make room for it, largest ranks first. None if it has room already, or if
        preempting all of them would not be enough, unless no running sequence can advance.
    """
    running = state.running
    if not running or (len(state.tenants) == 1 and rank_key(first) > rank_key(running[-1])):
        return []
    is_stuck = all_wait(running)
    has_slot = len(running) < state.limits.max_num_seqs
    missing = state.kv_cache.num_missing_blocks(first, num_spare_blocks(running, first, is_stuck))
    chosen: list[Sequence] = []
    num_taken: dict[str, int] = {}
    for sequence in reversed(running):
        if has_slot and max(missing) <= 0:
            return chosen
        tenant = sequence.tenant
        if is_stuck and rank_key(first) > rank_key(sequence):
            continue
        if not is_stuck and not _gives_way(state, first, sequence, num_taken.get(tenant, 0)):
            continue
        chosen.append(sequence)
        num_taken[tenant] = num_taken.get(tenant, 0) + 1
        freed = state.kv_cache.num_exclusive_blocks(sequence)
        missing = [num - num_freed for num, num_freed in zip(missing, freed, strict=True)]
        has_slot = True
    # Blocks that two of the chosen sequences share become free too, but have not been counted.
    return chosen if is_stuck or (has_slot and max(missing) <= 0) else []


def _gives_way(state: SchedulerState, first: Sequence, running: Sequence, num_taken: int) -> bool:
    """Whether a running sequence may be preempted, after `num_taken` others of its tenant were chosen."""
    if running.tenant == first.tenant:
        return rank_key(first) < rank_key(running) and state.policy.may_preempt(first, running)
    if _is_kept(state.running, running):
        return False
    max_num_seqs = state.limits.max_num_seqs
    has_too_much = state.tenants.of(running).num_running - num_taken > state.tenants.share(max_num_seqs)
    return has_too_much and state.tenants.is_owed(first, max_num_seqs)


def _is_kept(running: list[Sequence], sequence: Sequence) -> bool:
    """Whether this is the first running sequence or a beam of the first search: no other tenant takes it."""
    first = running[0]
    return sequence is first or (sequence.params.num_candidates > 0 and sequence.rank == first.rank)
