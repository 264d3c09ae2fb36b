"""Who gives way when slots or blocks run out.

Why everybody advances. Ranks are fixed, so the live sequences of all tenants have one order;
let s be the first of those that run. Both functions below take, from any one tenant, the
sequence of the largest rank first, and the last one of a tenant only where no tenant runs more
than one, or never. So s is taken for blocks only if it runs alone, and then it fits (`admission`);
it is taken for the first in the queue only by one that outranks it, and with ranks that are times
only finitely many can come that do. So s ends, and then its successor does.

Why little is computed twice. Nobody is admitted in a step that had to preempt for blocks, nobody
is admitted without room for all its known tokens, and one that was preempted comes back only if a
block is left over for each that runs: until it is preempted again some other sequence has filled a
whole block. What it loses is at most its own tokens, less what the prefix cache still holds.

Beams of one search wait for each other, and admission lets in only searches that fit the cache
and the slots alone. If all that run wait, the smallest rank in the queue takes what it needs from
larger ranks: it belongs to the first search, which fits. Beams of one search have one rank, and
those that have the rank of s give way to other tenants no more than s does: so the first search
keeps what it has until it ends.
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
    """What the choice depends on; `naiad.scheduler.scheduler.Scheduler` has it."""

    kv_cache: KVCacheManager
    limits: SchedulerLimits
    policy: SchedulingPolicy
    tenants: Tenants
    waiting: WaitingQueue
    running: list[Sequence]


def choose_for_blocks(running: list[Sequence], tenants: Tenants, max_num_seqs: int) -> Sequence:
    """The running sequence that gives up its blocks: the last of a tenant with more than its share.

    Args:
        running: at least two, by rank.
        tenants: of the sequences.
        max_num_seqs: slots.
    """
    if len(tenants) > 1:
        others = [each for each in reversed(running) if each.rank != running[0].rank]
        for num_kept in (tenants.share(max_num_seqs), 1):
            for sequence in others:
                if tenants.of(sequence).num_running > num_kept:
                    return sequence
    return running[-1]


def all_wait(running: list[Sequence]) -> bool:
    """Whether nobody can go on: all that run are beams that wait for others, or about to end."""
    return all(sequence.next_start == sequence.next_end for sequence in running)


def num_spare_blocks(running: list[Sequence], sequence: Sequence, is_stuck: bool) -> int:
    """Free blocks that have to be left over when a sequence is admitted."""
    if sequence.num_preemptions == 0 or is_stuck:
        return 0
    return len(running)


def choose_for_first(state: SchedulerState, first: Sequence) -> list[Sequence]:
    """The running sequences that give way to the one that is admitted next.

    Of its own tenant those the policy lets it preempt; of others, if its tenant has less than its
    share of the slots, those that their tenant has beyond its own share. If nobody can go on
    otherwise, all with larger ranks.

    Returns:
        The fewest that let it in, the largest ranks first; none if it has room, or, unless nobody
        can go on, if all of them would not be enough.
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
    # Blocks that two of them share are free when both are gone, and have not been counted.
    return chosen if is_stuck or (has_slot and max(missing) <= 0) else []


def _gives_way(state: SchedulerState, first: Sequence, running: Sequence, num_taken: int) -> bool:
    """Whether a running sequence must, when `num_taken` of its tenant do already."""
    if running.tenant == first.tenant:
        return rank_key(first) < rank_key(running) and state.policy.may_preempt(first, running)
    if running.rank == state.running[0].rank:
        return False
    max_num_seqs = state.limits.max_num_seqs
    has_too_much = state.tenants.of(running).num_running - num_taken > state.tenants.share(max_num_seqs)
    return has_too_much and state.tenants.is_owed(first, max_num_seqs)
