from __future__ import annotations

import pytest

from helpers.scheduler_desk import Desk
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import Sequence


def test_tenants_take_turns() -> None:
    desk = Desk(budget=4)
    for _ in range(4):
        desk.add(num_tokens=4, salt="flood")
    desk.add(num_tokens=4, salt="other")
    assert desk.step() + desk.step() == [(5, 4), (5, 1), (1, 3)]


def test_a_flood_gives_slots_to_another_tenant_and_keeps_its_share() -> None:
    desk = Desk(max_num_seqs=4)
    for _ in range(8):
        desk.add(salt="flood")
    desk.step()
    assert desk.running() == [1, 2, 3, 4]
    for _ in range(3):
        desk.add(salt="other")
    for _ in range(6):
        desk.step()
    assert sorted(desk.running()) == [1, 2, 9, 10]


@pytest.mark.parametrize("is_one_request", [True, False])
def test_the_sequences_of_one_request_give_slots_to_another_tenant(is_one_request: bool) -> None:
    desk = Desk(max_num_seqs=4)
    first = desk.add(salt="many")
    for _ in range(3):
        desk.add(salt="many", first_id=1000, donor=first if is_one_request else None)
    while len(desk.running()) < 4:
        desk.step()
    for _ in range(3):
        desk.add(salt="other")
    for _ in range(6):
        desk.step()
    assert sorted(desk.running()) == [1, 2, 5, 6]
    desk.scheduler.remove(first)
    desk.step()
    # The next one of the same request comes back.
    assert sorted(desk.running()) == [2, 3, 5, 6]


@pytest.mark.parametrize(("tenant", "running"), [("flood", [1, 2, 9, 10]), (None, [1, 2, 3, 4])])
def test_many_salts_of_one_tenant_take_one_share(tenant: str | None, running: list[int]) -> None:
    """Without a tenant each salt is one, and takes a share."""
    desk = Desk(max_num_seqs=4)
    for number in range(8):
        desk.add(salt=f"flood {number}", tenant=tenant)
    desk.step()
    for _ in range(3):
        desk.add(salt="other")
    for _ in range(6):
        desk.step()
    assert sorted(desk.running()) == running


def test_many_salts_of_one_tenant_share_its_tokens() -> None:
    desk = Desk(budget=8, max_num_seqs=16, num_blocks=256)
    served = {"many": 0, "one": 0}
    for number in range(200):
        if number % 2 == 0:
            desk.add(num_tokens=8, salt="one")
        for _ in range(4):
            desk.add(num_tokens=4, salt=f"salt {desk.num_added}", tenant="many")
        for sequence_id, num_tokens in desk.step():
            sequence = next(each for each in desk.scheduler.running if each.sequence_id == sequence_id)
            served[sequence.tenant] += num_tokens
        for sequence in list(desk.scheduler.running):
            if sequence.num_computed_tokens == sequence.num_prompt_tokens:
                desk.scheduler.remove(sequence)
    assert 0.8 < served["many"] / served["one"] < 1.25


def test_who_comes_beside_a_flood_runs_in_the_next_step_and_the_flood_waits_for_it() -> None:
    desk = Desk(max_num_seqs=4)
    for _ in range(8):
        desk.add(num_tokens=4, salt="flood")
    desk.step()
    desk.add(num_tokens=6, salt="quiet")
    assert desk.step() == [(9, 6)]
    # The fourth sequence has lost its slot.
    assert [row[0] for row in desk.step()] == [1, 2, 3, 9]


def test_a_flood_never_waits_for_two_steps() -> None:
    desk = Desk(max_num_seqs=4)
    for _ in range(8):
        desk.add(num_tokens=4, salt="flood")
    desk.step()
    rows = []
    for _ in range(4):
        quiet = desk.add(num_tokens=2, salt="quiet")
        rows.append([row[0] for row in desk.step()])
        desk.scheduler.remove(quiet)
    assert rows == [[9], [1, 2, 10], [11], [1, 2, 12]]


def test_tenants_that_keep_to_their_shares_do_not_wait_for_each_other() -> None:
    desk = Desk(max_num_seqs=4)
    for salt in ("a", "a", "b"):
        desk.add(num_tokens=4, salt=salt)
    desk.step()
    desk.add(num_tokens=6, salt="b")
    assert desk.step() == [(1, 1), (2, 1), (3, 1), (4, 6)]


def test_who_has_less_than_its_share_of_slots_does_not_wait_for_a_flood_that_was_served_less() -> None:
    desk = Desk(max_num_seqs=4)
    for _ in range(8):
        desk.add(num_tokens=4, salt="flood")
    desk.step()
    first = desk.add(num_tokens=20, salt="quiet")
    desk.step()
    tenants = desk.scheduler.tenants
    assert tenants.of(first).num_served_tokens > tenants.of(desk.scheduler.running[0]).num_served_tokens
    desk.add(num_tokens=6, salt="quiet")
    desk.step()
    assert desk.running() == [1, 2, 9, 10]


def test_a_flood_keeps_all_its_rows_beside_one_that_does_not_fit() -> None:
    desk = Desk(num_blocks=8, max_num_seqs=4)
    for _ in range(2):
        desk.add(num_tokens=9, salt="flood")
    desk.add(num_tokens=3, salt="other")
    desk.step()
    desk.add(num_tokens=28, salt="quiet")
    assert [row[0] for row in desk.step()] == [1, 2, 3]


def test_a_flood_gives_blocks_to_another_tenant() -> None:
    desk = Desk(num_blocks=8, max_num_seqs=4)
    for _ in range(4):
        desk.add(num_tokens=7, salt="flood")
    desk.step()
    desk.add(num_tokens=8, salt="other")
    desk.step()
    assert 5 in desk.running()


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    desk = Desk(budget=8, max_num_seqs=2)
    gone = desk.add(salt="b")
    desk.step()
    desk.scheduler.remove(gone)
    first = desk.add(num_tokens=30, salt="a")
    for _ in range(4):
        desk.step()
    back = desk.add(salt="b")
    tenants = desk.scheduler.tenants
    assert tenants.of(back).num_served_tokens == tenants.of(first).num_served_tokens


def test_a_tenant_that_goes_away_after_each_request_keeps_to_its_share() -> None:
    desk = Desk(budget=64, max_num_seqs=1, num_blocks=64)
    served = {"big": 0, "steady": 0}
    big: Sequence | None = None
    for _ in range(400):
        if big is None:
            big = desk.add(num_tokens=40, salt="big")
        while len(desk.scheduler.waiting) < 4:
            desk.add(num_tokens=4, salt="steady")
        for sequence_id, num_tokens in desk.step():
            sequence = next(each for each in desk.scheduler.running if each.sequence_id == sequence_id)
            served[sequence.tenant] += num_tokens
            desk.scheduler.remove(sequence)
            big = None if sequence is big else big
    assert 0.8 < served["big"] / served["steady"] < 1.25


def test_tenants_that_always_come_new_do_not_starve_one_that_is_ahead() -> None:
    desk = Desk(budget=64, max_num_seqs=2)
    ahead = desk.add(num_tokens=60, salt="ahead")
    desk.add(salt="light")
    desk.step()
    desk.scheduler.remove(ahead)
    again = desk.add(salt="ahead")
    num_steps = 0
    while again.num_computed_tokens == 0:
        while len(desk.scheduler.waiting) < 4:
            desk.add(num_tokens=4, salt=f"new {desk.num_added}")
        desk.step()
        for sequence in list(desk.scheduler.running):
            if sequence is not again:
                desk.scheduler.remove(sequence)
        num_steps += 1
    # It is 58 tokens ahead: these are computed for each of five or six tenants, eight tokens per step.
    assert num_steps < 60 * 6 / 8


def test_debts_are_forgotten_when_they_are_paid() -> None:
    desk = Desk(budget=64, max_num_seqs=2)
    ahead = desk.add(num_tokens=60, salt="ahead")
    desk.add(salt="light")
    desk.step()
    desk.scheduler.remove(ahead)
    assert len(desk.scheduler.tenants._debts) == 1
    for _ in range(60):
        desk.step()
    assert len(desk.scheduler.tenants._debts) == 0


def test_blocks_are_taken_from_the_tenant_that_has_more_than_its_share() -> None:
    desk = Desk(num_blocks=4, max_num_seqs=2)
    for _ in range(2):
        desk.add(num_tokens=3, salt="many")
    desk.step()
    desk.scheduler.limits = SchedulerLimits(4, 32)
    desk.add(num_tokens=3, salt="one")
    while desk.scheduler.num_preemptions == 0:
        desk.step()
    assert 3 in desk.running()
    assert 1 in desk.running()


@pytest.mark.parametrize("is_one_request", [True, False])
def test_blocks_are_taken_from_the_sequences_of_one_request(is_one_request: bool) -> None:
    desk = Desk(num_blocks=12)
    first = desk.add(num_tokens=3, salt="many")
    for _ in range(3):
        desk.add(num_tokens=3, salt="many", first_id=1000, donor=first if is_one_request else None)
    while len(desk.running()) < 4:
        desk.step()
    desk.add(num_tokens=3, salt="one")
    while desk.scheduler.num_preemptions == 0:
        desk.step()
    assert desk.running() == [1, 2, 3, 5]


def test_blocks_are_taken_from_a_tenant_above_its_share_before_one_that_keeps_to_it() -> None:
    desk = Desk(num_blocks=6, max_num_seqs=6)
    desk.add(num_tokens=4, salt="many")
    for _ in range(3):
        desk.add(num_tokens=1, salt="many")
    for _ in range(2):
        desk.add(num_tokens=1, salt="two")
    desk.step()
    desk.step()
    assert desk.running() == [1, 2, 3, 5, 6]


def test_nobody_is_admitted_in_a_step_that_took_blocks_from_another() -> None:
    desk = Desk(num_blocks=8)
    for _ in range(2):
        desk.add(num_tokens=16, salt="one")
    desk.step()
    desk.add(num_tokens=1, salt="other")
    assert desk.step() == [(1, 1)]
    assert desk.step() == [(1, 1), (3, 1)]


def test_who_was_preempted_gets_its_spare_blocks_from_a_tenant_above_its_share() -> None:
    desk = Desk(num_blocks=11, max_num_seqs=6)
    for num_tokens in (2, 2, 2, 14):
        desk.add(num_tokens=num_tokens, salt="flood")
    desk.step()
    # Four blocks are free: enough for its three, but not for one spare block per running sequence too.
    desk.add(num_tokens=10, salt="quiet").num_preemptions = 1
    desk.step()
    assert desk.running() == [1, 2, 3, 5]
