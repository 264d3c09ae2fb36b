from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naiad.speculation.policy import AcceptanceState, DraftRow, SpeculationPolicy
from naiad.speculation.step_cost import StepCost

FLAT = StepCost([(1, 1.0), (100_000, 1.0)])
# As on a CPU: a window of 8 costs 1.35 times a single token.
GENTLE = StepCost([(1, 1.0), (8, 1.35), (64, 4.15)])
PROPORTIONAL = StepCost([(1, 1.0)])

COSTS = st.lists(
    st.tuples(st.integers(1, 20), st.floats(0.1, 10)), min_size=1, max_size=6, unique_by=lambda each: each[0]
).map(lambda measured: StepCost(sorted(measured)))
RATES = st.floats(0.01, 0.99)


def state_with(rate: float) -> AcceptanceState:
    return AcceptanceState(num_judged=100.0, num_accepted=100.0 * rate)


def seconds(cost: StepCost, num_tokens: int) -> float:
    return float(cost(np.array(num_tokens)))


def outputs_per_second(
    cost: StepCost, rates: list[float], counts: tuple[int, ...] | list[int], num_step_tokens: int
) -> float:
    outputs = sum(rate**place for rate, num in zip(rates, counts, strict=True) for place in range(num + 1))
    added_s = seconds(cost, num_step_tokens + sum(counts)) - seconds(cost, num_step_tokens)
    return outputs / (seconds(cost, len(rates)) + added_s)


@settings(deadline=None)
@given(COSTS, st.lists(st.tuples(RATES, st.integers(0, 3)), min_size=1, max_size=3), st.integers(0, 9))
def test_no_other_shares_bring_more_tokens_a_second(
    cost: StepCost, rows: list[tuple[float, int]], num_prompt_tokens: int
) -> None:
    rates = [rate for rate, _ in rows]
    num_step_tokens = len(rows) + num_prompt_tokens
    policy = SpeculationPolicy(cost, probe_share=0.0)
    counts = policy.plan([DraftRow(state_with(rate), most) for rate, most in rows], num_step_tokens)
    assert all(0 <= num <= most for num, (_, most) in zip(counts, rows, strict=True))
    best = max(
        outputs_per_second(cost, rates, each, num_step_tokens)
        for each in itertools.product(*(range(most + 1) for _, most in rows))
    )
    assert outputs_per_second(cost, rates, counts, num_step_tokens) == pytest.approx(best)


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
    """Seconds of steps in which every draft is wrong."""
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
    # One that is not read holds up nobody else.
    assert policy.plan([costly(state, 4, 2000, 5), costly(state, 4)], 2)[1] > 0


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_a_draft_model_that_is_always_wrong_costs_four_percent_at_most(num_rows: int) -> None:
    """Of 512 steps; all it has to read are its own sequences' new tokens."""
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

    assert first_probe(0) < first_probe(100) < first_probe(1000)


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


def test_a_model_whose_passes_attend_dearly_drafts_less() -> None:
    passes = StepCost([(1, 0.1), (64, 0.1)], [(1, 1e-3)])
    policy = SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=passes)
    rows = [DraftRow(state_with(0.8), 8, 0, 100, num_context=context) for context in (0, 200, 2000)]
    numbers = [policy.plan([row], 1)[0] for row in rows]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[1] > numbers[2] == 0
