"""Accounts of tenants: shares of a step's time, blocks, and tokens."""

from __future__ import annotations

import random

import pytest

from helpers.accounts import ExpectedAccounts
from helpers.engine_drive import EngineDrive
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import StepBatch
from naiad.sequence import SamplingParams
from naiad.snapshot import tenant_label
from naiad.usage import MAX_TENANTS, OTHER_TENANTS, TenantUsage


def usage_of(drive: EngineDrive, tenant: str) -> TenantUsage:
    (found,) = [each for each in drive.engine.usages() if each.tenant == tenant_label(tenant)]
    return found


def let_steps_take(drive: EngineDrive, seconds_per_token: float) -> list[float]:
    """Make each step of the drive take time; return the list that their seconds are added to."""
    taken: list[float] = []
    launch = drive.runner.launch

    def slow_launch(step: StepBatch) -> object:
        wait = launch(step)
        seconds = seconds_per_token * sum(row.num_scheduled_tokens for row in step.rows)
        taken.append(seconds)

        def slow_wait() -> object:
            drive.now += seconds
            return wait()

        return slow_wait

    drive.runner.launch = slow_launch  # type: ignore[method-assign, assignment]
    return taken


def test_a_steps_time_is_divided_by_tokens() -> None:
    drive = EngineDrive(budget=64)
    taken = let_steps_take(drive, 0.01)
    drive.add(1, [1] * 30, SamplingParams(max_tokens=1), tenant="a")
    drive.add(2, [2] * 10, SamplingParams(max_tokens=1), tenant="b")
    drive.run()
    assert len(taken) == 1
    assert usage_of(drive, "a").step_s == pytest.approx(0.3)
    assert usage_of(drive, "b").step_s == pytest.approx(0.1)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_sums_are_the_busy_time(overlaps: bool) -> None:
    rng = random.Random(7)
    drive = EngineDrive(num_blocks=24, budget=16, overlaps=overlaps)
    taken = let_steps_take(drive, 0.003)
    for sequence_id in range(60):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        tenant = rng.choice("abc")
        drive.add(sequence_id, prompt, SamplingParams(max_tokens=rng.randint(1, 30)), tenant=tenant)
        for _ in range(rng.randint(0, 6)):
            drive.now += rng.choice((0.0, 0.5))
            drive.step()
        if rng.random() < 0.3:
            drive.abort(rng.randrange(sequence_id + 1))
    drive.run()
    assert drive.engine.stats().total_preemptions
    usages = drive.engine.usages()
    assert len(usages) == 3
    busy_s = sum(each.step_s for each in usages)
    # What the engine does between the end of one overlapping step and the launch of the next counts as busy.
    assert busy_s == pytest.approx(sum(taken)) if not overlaps else sum(taken) - 1e-9 <= busy_s <= drive.now


def test_a_shared_block_is_divided_among_its_holders() -> None:
    drive = EngineDrive(block_size=4, prefix_cache=PrefixCache(4))
    accounts = ExpectedAccounts(drive)
    prefix = list(range(8))
    for sequence_id, tenant in enumerate(("a", "a", "b")):
        drive.add(sequence_id, [*prefix, 9], SamplingParams(max_tokens=40), tenant=tenant)
        accounts.pass_time(1.0)
        drive.step()
    pool = drive.scheduler.kv_cache.groups[0].pool
    assert max(pool.ref_counts) == 3
    before = {each.tenant: each.block_s for each in drive.engine.usages()}
    accounts.pass_time(10.0)
    after = {each.tenant: each.block_s for each in drive.engine.usages()}
    # Two shared blocks, and one that is a sequence's own, or two since it has grown.
    own = [len(sequence.block_tables[0]) - 2 for sequence in drive.scheduler.running]
    spent = {tenant: after[tenant] - before[tenant] for tenant in after}
    assert spent == pytest.approx(
        {tenant_label("a"): 10 * (2 * 2 / 3 + own[0] + own[1]), tenant_label("b"): 10 * (2 / 3 + own[2])}
    )
    drive.run()
    accounts.check()


def test_cached_tokens_are_counted_apart() -> None:
    drive = EngineDrive(block_size=4, prefix_cache=PrefixCache(4))
    for sequence_id in range(2):
        drive.add(sequence_id, list(range(11)), SamplingParams(max_tokens=3), tenant="a")
        drive.run()
    found = usage_of(drive, "a")
    assert (found.num_prompt_tokens, found.num_cached_tokens, found.num_output_tokens) == (22, 8, 6)


def test_many_tenants_share_the_last_account() -> None:
    drive = EngineDrive()
    num = MAX_TENANTS + 3
    for sequence_id in range(num):
        drive.add(sequence_id, [1, 2], SamplingParams(max_tokens=1), tenant=f"tenant {sequence_id}")
        drive.run()
    usages = drive.engine.usages()
    assert len(usages) == MAX_TENANTS + 1
    assert usages[-1].tenant == OTHER_TENANTS
    assert usages[-1].num_output_tokens == 3
    assert sum(each.num_prompt_tokens for each in usages) == 2 * num
