from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.draft_costs import (
    COSTS,
    FLAT,
    GENTLE,
    PROPORTIONAL,
    RATES,
    outputs_per_second,
    seconds,
    state_with,
)
from naiad.speculation import policy as policy_module
from naiad.speculation.policy import AcceptanceState, DraftRow, SpeculationPolicy
from naiad.speculation.step_cost import StepCost


@pytest.mark.parametrize("few", [0, 64], ids=["with NumPy", "without"])
@settings(deadline=None)
@given(COSTS, st.lists(st.tuples(RATES, st.integers(0, 3)), min_size=1, max_size=3), st.integers(0, 9))
def test_no_other_shares_bring_more_tokens_a_second(
    few: int, cost: StepCost, rows: list[tuple[float, int]], num_prompt_tokens: int
) -> None:
    rates = [rate for rate, _ in rows]
    num_step_tokens = len(rows) + num_prompt_tokens
    policy = SpeculationPolicy(cost, probe_share=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "_FEW", few)
        counts = policy.plan([DraftRow(state_with(rate), most) for rate, most in rows], num_step_tokens)
    assert all(0 <= num <= most for num, (_, most) in zip(counts, rows, strict=True))
    best = max(
        outputs_per_second(cost, rates, each, num_step_tokens)
        for each in itertools.product(*(range(most + 1) for _, most in rows))
    )
    assert outputs_per_second(cost, rates, counts, num_step_tokens) == pytest.approx(best)


def test_few_tokens_are_shared_out_like_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """With contexts, drawn tokens, prompts in the step, little room, and rows that save for a probe."""
    draw = random.Random(7)
    cost = StepCost([(1, 1.0), (8, 1.3), (64, 4.0)], [(1, 1e-4), (9, 5e-4)], num_context=200, drawn_s=0.02)
    policy = SpeculationPolicy(cost)
    num_with_drafts, num_probes = 0, 0
    for _ in range(500):
        rows = [
            DraftRow(
                replace(state_with(draw.random() ** 2), credit_s=draw.random()),
                draw.randint(0, 8),
                num_unread=draw.choice((-1, -1, 0, 5)),
                num_context=draw.randrange(3000),
                is_drawn=draw.random() < 0.3,
            )
            for _ in range(draw.randint(1, 8))
        ]
        copies = [row._replace(state=replace(row.state)) for row in rows]
        num_tokens, num_room = len(rows) + draw.choice((0, 30)), draw.choice((2, 1000))
        with monkeypatch.context() as patch:
            patch.setattr(policy_module, "_FEW", 0)
            expected = policy.plan(copies, num_tokens, num_room)
        before = [row.state.credit_s for row in rows]
        assert policy.plan(rows, num_tokens, num_room) == expected
        credits_s = [row.state.credit_s for row in rows]
        assert credits_s == pytest.approx([row.state.credit_s for row in copies])
        num_with_drafts += any(expected)
        num_probes += any(now < then for now, then in zip(credits_s, before, strict=True))
    assert min(num_with_drafts, num_probes) > 50


@settings(deadline=None)
@given(COSTS, RATES, RATES, st.integers(1, 16), st.integers(1, 9))
def test_a_better_rate_never_gets_fewer(
    cost: StepCost, rate: float, other: float, most: int, num_step_tokens: int
) -> None:
    policy = SpeculationPolicy(cost, probe_share=0.0)
    low, high = (
        policy.plan([DraftRow(state_with(each), most)], num_step_tokens)[0] for each in sorted((rate, other))
    )
    assert low <= high


@settings(deadline=None)
@given(COSTS, st.lists(RATES, min_size=2, max_size=9, unique=True), st.integers(1, 8))
def test_of_a_step_the_likelier_rows_get_more(cost: StepCost, rates: list[float], most: int) -> None:
    rows = [DraftRow(state_with(rate), most) for rate in sorted(rates)]
    counts = SpeculationPolicy(cost, probe_share=0.0).plan(rows, len(rows))
    assert counts == sorted(counts)


@settings(deadline=None)
@given(st.lists(st.tuples(RATES, st.integers(0, 8)), min_size=1, max_size=40))
def test_a_full_batch_gets_none_and_a_free_token_is_taken(rows: list[tuple[float, int]]) -> None:
    states = [DraftRow(state_with(rate), most) for rate, most in rows]
    full = SpeculationPolicy(PROPORTIONAL, probe_share=0.0)
    assert full.plan(states, len(rows)) == [0] * len(rows)
    free = SpeculationPolicy(FLAT, probe_share=0.0)
    assert free.plan([DraftRow(state_with(0.5), most) for _, most in rows], len(rows)) == [
        most for _, most in rows
    ]


def test_more_load_gets_fewer_until_none() -> None:
    cost = StepCost([(1, 1.0), (16, 1.1), (64, 2.0), (512, 16.0)])
    policy = SpeculationPolicy(cost, probe_share=0.0)
    counts = [policy.plan([DraftRow(state_with(0.7), 8)] * num, num)[0] for num in (1, 4, 16, 64, 256)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 8
    assert counts[-1] == 0


def test_prompts_in_the_step_do_not_matter_where_the_curve_is_straight() -> None:
    cost = StepCost([(1, 1.0), (1000, 40.96)])
    policy = SpeculationPolicy(cost, probe_share=0.0)
    rows = [DraftRow(state_with(0.6), 8), DraftRow(state_with(0.8), 8)]
    assert policy.plan(rows, 2) == policy.plan(rows, 700)


@pytest.mark.parametrize("num_room", [0, 1, 3, 8])
def test_no_more_than_there_is_room_for(num_room: int) -> None:
    rows = [DraftRow(state_with(rate), 8) for rate in (0.5, 0.9, 0.2)]
    for row in rows:
        row.state.credit_s = 10.0
    policy = SpeculationPolicy(FLAT)
    counts = policy.plan(rows, 3, num_room)
    assert sum(counts) == num_room
    assert counts[1] == max(counts)


def test_nothing_to_share_out() -> None:
    policy = SpeculationPolicy(GENTLE)
    assert policy.plan([], 5) == []
    assert policy.plan([DraftRow(AcceptanceState(), 0)] * 3, 5) == [0, 0, 0]


def seconds_with(policy: SpeculationPolicy, cost: StepCost, num_rows: int, num_steps: int) -> float:
    """Seconds of a number of steps in which every draft is rejected."""
    states = [AcceptanceState() for _ in range(num_rows)]
    spent_s = 0.0
    for _ in range(num_steps):
        counts = policy.plan([DraftRow(state, 8) for state in states], num_rows)
        spent_s += seconds(cost, num_rows + sum(counts))
        for state, num in zip(states, counts, strict=True):
            if num:
                state.update(num, 0)
    return spent_s


@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("cost", [FLAT, GENTLE, PROPORTIONAL], ids=["flat", "gentle", "proportional"])
def test_drafts_that_are_always_wrong_cost_three_percent_at_most(cost: StepCost, num_rows: int) -> None:
    spent_s = seconds_with(SpeculationPolicy(cost), cost, num_rows, 128)
    assert spent_s <= 1.03 * 128 * seconds(cost, num_rows)


@pytest.mark.parametrize("probe_share", [0.0, 0.01, 0.1])
def test_probes_cost_their_share_and_no_more(probe_share: float) -> None:
    spent_s = seconds_with(SpeculationPolicy(PROPORTIONAL, probe_share), PROPORTIONAL, 10, 1000)
    extra_share = spent_s / (1000 * seconds(PROPORTIONAL, 10)) - 1
    assert 0.9 * probe_share <= extra_share <= probe_share + 1e-9


def test_a_sequence_that_becomes_predictable_is_found_out() -> None:
    policy = SpeculationPolicy(GENTLE)
    state = AcceptanceState()
    for _ in range(200):
        (num,) = policy.plan([DraftRow(state, 8)], 1)
        if num:
            state.update(num, 0)
    assert state.rate < 0.01
    counts = []
    for _ in range(60):
        (num,) = policy.plan([DraftRow(state, 8)], 1)
        counts.append(num)
        if num:
            state.update(num, num)
    assert counts[-1] == 8


# A pass of a draft model costs a tenth of a step of the target.
def test_a_window_is_judged_up_to_its_first_rejection() -> None:
    state = AcceptanceState(num_judged=0.0, num_accepted=0.0)
    state.update(num_draft_tokens=6, num_accepted_tokens=2)
    assert (state.num_accepted, state.num_judged) == (2, 3)
    state = AcceptanceState(num_judged=0.0, num_accepted=0.0)
    state.update(num_draft_tokens=6, num_accepted_tokens=6)
    assert (state.num_accepted, state.num_judged) == (6, 6)


@settings(deadline=None)
@given(RATES, st.integers(1, 8))
def test_the_rate_tends_to_what_is_seen(rate: float, num_draft_tokens: int) -> None:
    state = state_with(rate)
    for _ in range(400):
        state.update(num_draft_tokens, 0)
    assert state.rate < 0.001
    for _ in range(400):
        state.update(num_draft_tokens, num_draft_tokens)
    assert 0.999 < state.rate <= 1


@pytest.mark.asserts
@pytest.mark.parametrize(("num_draft", "num_accepted"), [(0, 0), (2, 3), (2, -1)])
def test_an_impossible_window_is_our_bug(num_draft: int, num_accepted: int) -> None:
    with pytest.raises(AssertionError):
        AcceptanceState().update(num_draft, num_accepted)


def test_where_attention_is_dear_a_long_context_gets_fewer() -> None:
    """Each token of context costs 1 ms for one token, 2 ms for two and 5 ms for five."""
    cost = StepCost([(1, 1.0), (64, 1.0)], [(1, 1e-3), (5, 5e-3)], num_context=100)
    policy = SpeculationPolicy(cost, probe_share=0.0)

    def num_drafts(*contexts: int) -> list[int]:
        rows = [DraftRow(state_with(0.8), 4, num_context=context) for context in contexts]
        return policy.plan(rows, len(rows))

    assert num_drafts(50) == num_drafts(100) == [4]
    numbers = [num_drafts(context)[0] for context in (100, 500, 1000, 2000, 9000)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 0
    assert sum(num_drafts(100, 9000)) < sum(num_drafts(100, 100))


def test_a_probe_is_paid_for_with_what_attention_adds() -> None:
    cost = StepCost([(1, 1.0), (64, 1.0)], [(1, 0.0), (2, 1e-2)])
    policy = SpeculationPolicy(cost, probe_share=0.01)
    row = DraftRow(state_with(0.0), 4, num_context=1000)
    num_steps = next(step for step in range(5000) if policy.plan([row], 1) == [1])
    assert num_steps == pytest.approx(1000, abs=2)


def test_drawing_dearly_brings_fewer_drafts() -> None:
    cost = StepCost([(1, 1.0), (64, 1.0)], drawn_s=0.3)
    policy = SpeculationPolicy(cost, probe_share=0.0)
    greedy, drawn = (
        policy.plan([DraftRow(state_with(0.7), 8, is_drawn=is_drawn)], 1)[0] for is_drawn in (False, True)
    )
    assert greedy == 8
    assert 0 < drawn < 8
