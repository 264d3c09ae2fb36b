"""The policy's draft tokens when a draft model's passes cost time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.draft_costs import (
    COSTS,
    FLAT,
    GENTLE,
    RATES,
    seconds,
    state_with,
)
from naiad.speculation.policy import AcceptanceState, DraftRow, SpeculationPolicy
from naiad.speculation.step_cost import StepCost

DRAFT = StepCost([(1, 0.1), (8, 0.135), (64, 0.415)])


def costly(state: AcceptanceState, most: int, num_unread: int = 0, num_left: int = 500) -> DraftRow:
    return DraftRow(state, most, num_unread, num_left)


@settings(deadline=None)
@given(COSTS, COSTS, st.lists(st.tuples(RATES, st.integers(0, 3)), min_size=1, max_size=4))
def test_a_draft_models_passes_never_make_it_worse_than_no_drafts(
    cost: StepCost, pass_cost: StepCost, rows: list[tuple[float, int]]
) -> None:
    policy = SpeculationPolicy(cost, probe_share=0.0, pass_cost=pass_cost)
    counts = policy.plan([costly(state_with(rate), most) for rate, most in rows], len(rows))
    outputs = sum(
        rate**place for (rate, _), num in zip(rows, counts, strict=True) for place in range(num + 1)
    )
    spent_s = seconds(cost, len(rows) + sum(counts)) + passes_s(pass_cost, counts)
    assert outputs / spent_s >= len(rows) / seconds(cost, len(rows)) * (1 - 1e-9)


def passes_s(pass_cost: StepCost, counts: list[int]) -> float:
    num_rows = [sum(count > place for count in counts) for place in range(max(counts, default=0))]
    return sum(seconds(pass_cost, num) for num in num_rows)


@settings(deadline=None)
@given(COSTS, RATES, st.integers(1, 16), st.floats(0.001, 10), st.floats(1, 100))
def test_dearer_passes_never_bring_more_drafts(
    cost: StepCost, rate: float, most: int, pass_s: float, factor: float
) -> None:
    cheap, dear = (
        SpeculationPolicy(cost, probe_share=0.0, pass_cost=StepCost([(1, each)])).plan(
            [costly(state_with(rate), most)], 1
        )
        for each in (pass_s, factor * pass_s)
    )
    assert dear <= cheap


def test_passes_that_cost_nothing_are_as_free_drafts() -> None:
    nothing = StepCost([(1, 1e-12), (100, 1e-12)])
    states = [state_with(rate) for rate in (0.2, 0.5, 0.9)]
    free = SpeculationPolicy(GENTLE).plan([DraftRow(state, 8) for state in states], 3)
    assert (
        SpeculationPolicy(GENTLE, pass_cost=nothing).plan([costly(state, 8) for state in states], 3) == free
    )


def test_a_draft_that_is_there_costs_no_pass() -> None:
    policy = SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=StepCost([(1, 1.0)]))
    assert policy.plan([DraftRow(state_with(0.6), 4)], 1) == [4]
    assert policy.plan([costly(state_with(0.6), 4)], 1) == [0]


def test_rows_that_draft_together_share_a_pass() -> None:
    rows = [costly(state_with(0.7), 4)] * 16
    together = SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=StepCost([(1, 0.5), (64, 0.5)]))
    assert together.plan(rows, 16) == [1] * 16
    apart = SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=StepCost([(1, 0.5)]))
    assert apart.plan(rows, 16) == [0] * 16


def test_a_text_is_read_where_that_is_paid_back() -> None:
    policy = SpeculationPolicy(GENTLE, probe_share=0.0, pass_cost=DRAFT)
    state = state_with(0.6)
    assert policy.plan([costly(state, 4, num_unread=2000, num_left=500)], 1)[0] > 0
    assert policy.plan([costly(state, 4, num_unread=2000, num_left=5)], 1) == [0]
    assert policy.plan([costly(state, 4, num_unread=10, num_left=5)], 1)[0] > 0
    # A sequence with unread tokens does not affect the others.
    assert policy.plan([costly(state, 4, 2000, 5), costly(state, 4)], 2)[1] > 0


def test_reading_must_pay_for_itself_even_if_the_model_is_nearly_always_right() -> None:
    """A pass costs half of a step: the best drafts save a third of the time, and reading takes 100."""
    policy = SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=StepCost([(1, 0.5), (2000, 100.0)]))
    assert policy.plan([costly(state_with(0.95), 4, num_unread=2000, num_left=150)], 1) == [0]
    assert policy.plan([costly(state_with(0.95), 4, num_unread=2000, num_left=1000)], 1)[0] > 0


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_a_draft_model_that_is_always_wrong_costs_four_percent_at_most(num_rows: int) -> None:
    """Over 512 steps; the model has to read only the new tokens of its sequences."""
    policy = SpeculationPolicy(GENTLE, pass_cost=DRAFT)
    states = [AcceptanceState() for _ in range(num_rows)]
    num_unread = [0] * num_rows
    spent_s = 0.0
    for _ in range(512):
        rows = [costly(state, 8, num) for state, num in zip(states, num_unread, strict=True)]
        counts = policy.plan(rows, num_rows)
        num_read = sum(num for num, count in zip(num_unread, counts, strict=True) if count)
        reading_s = seconds(DRAFT, 1 + num_read) - seconds(DRAFT, 1)
        spent_s += seconds(GENTLE, num_rows + sum(counts)) + passes_s(DRAFT, counts) + reading_s
        for place, (state, count) in enumerate(zip(states, counts, strict=True)):
            num_unread[place] = 0 if count else num_unread[place] + 1
            if count:
                state.update(count, 0)
    assert spent_s <= 1.04 * 512 * seconds(GENTLE, num_rows)


def test_a_probe_puts_aside_what_reading_costs() -> None:
    def first_probe(num_unread: int) -> int:
        policy = SpeculationPolicy(GENTLE, pass_cost=DRAFT)
        state = state_with(0.001)
        for number in range(100_000):
            if policy.plan([costly(state, 4, num_unread)], 1)[0]:
                return number
        raise AssertionError("it is never tried")

    assert first_probe(0) < first_probe(8) < first_probe(16)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_model_that_was_wrong_is_tried_again_however_far_behind(num_rows: int) -> None:
    """The number of unread tokens grows with each step in which the model is not asked."""
    policy = SpeculationPolicy(GENTLE, pass_cost=DRAFT)
    states = [state_with(0.02) for _ in range(num_rows)]
    for num_unread in range(20, 2000):
        rows = [costly(state, 8, num_unread, num_left=1000) for state in states]
        if any(policy.plan(rows, num_rows)):
            break
    assert 100 < num_unread < 1500


def test_a_model_whose_passes_attend_dearly_drafts_less() -> None:
    passes = StepCost([(1, 0.1), (64, 0.1)], [(1, 1e-3)])
    policy = SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=passes)
    rows = [DraftRow(state_with(0.8), 8, 0, 100, num_context=context) for context in (0, 200, 2000)]
    numbers = [policy.plan([row], 1)[0] for row in rows]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[1] > numbers[2] == 0
