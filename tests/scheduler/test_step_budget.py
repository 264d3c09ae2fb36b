from __future__ import annotations

import random

from naiad.scheduler.step_budget import MIN_CHUNK_TOKENS, SchedulerLimits, StepBudget


def test_without_a_context_cost_tokens_are_counted() -> None:
    budget = StepBudget(SchedulerLimits(8, 100))
    assert [budget.take(5_000, 1), budget.take(0, 40), budget.take(9_000, 300), budget.take(0, 1)] == [
        *(1, 40, 59, 0),
    ]
    assert budget.is_spent


def test_a_chunk_late_in_a_prompt_is_smaller() -> None:
    limits = SchedulerLimits(8, 128, context_cost=1 / 2000)
    sizes = [StepBudget(limits).take(start, 10_000) for start in (0, 1_000, 2_000, 6_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 128
    # At this position a token costs twice as much.
    assert 64 <= sizes[2] <= 66


def test_the_first_chunk_has_its_least_size_however_much_it_costs() -> None:
    budget = StepBudget(SchedulerLimits(64, 64, context_cost=1.0))
    assert [budget.take(100_000, 1) for _ in range(40)] == [1] * 40
    assert budget.take(100_000, 500) == MIN_CHUNK_TOKENS
    assert budget.is_spent
    assert budget.take(0, 1) == 0


def test_running_texts_take_their_cost_from_prompts_and_are_never_held_up() -> None:
    budget = StepBudget(SchedulerLimits(64, 64, decode_cost=2.0))
    assert [budget.take(9, 1) for _ in range(20)] == [1] * 20
    assert budget.take(0, 500) == 64 - 2 * 20
    budget = StepBudget(SchedulerLimits(64, 64, decode_cost=2.0))
    assert [budget.take(9, 1) for _ in range(60)] == [1] * 60
    assert budget.take(0, 500) == 4


def test_a_step_costs_no_more_than_its_budget() -> None:
    draw = random.Random(0)
    for _ in range(500):
        limits = SchedulerLimits(8, draw.randrange(32, 2048), draw.choice((0.0, 1e-4, 1e-3, 1e-2)))
        budget = StepBudget(limits)
        tokens, cost, num_chunks = 0, 0.0, 0
        while not budget.is_spent:
            start, num_missing = draw.randrange(3_000), draw.choice((1, draw.randrange(2, 3_000)))
            given = budget.take(start, num_missing)
            assert 1 <= given <= num_missing
            tokens += given
            if num_missing > 1:
                num_chunks += 1
                # The first chunk may exceed the cost if it has the minimum size.
                is_least = num_chunks == 1 and given == min(MIN_CHUNK_TOKENS, num_missing)
                context_cost = limits.context_cost * given * (start + given / 2)
                cost += given if is_least else given + context_cost
            else:
                cost += 1
        assert tokens <= limits.max_num_batched_tokens
        # The last token may cost more than what is left.
        whole = limits.max_num_batched_tokens * (1 + limits.context_cost * limits.max_num_batched_tokens / 2)
        assert cost <= whole + 1 + limits.context_cost * 3_000


def test_drafts_late_in_a_text_cost_more_and_leave_no_debt() -> None:
    limits = SchedulerLimits(8, 128, context_cost=1 / 2000)
    budget = StepBudget(limits)
    # A whole step costs as much as 132 tokens without context; at this position a token costs twice as much.
    assert budget.take_drafts(2_000, 20) == 20
    assert budget.num_drafts_left == 132 - 40
    assert StepBudget(limits).take_drafts(20_000, 100) == 12
    assert [budget.take_drafts(0, 1000), budget.take_drafts(0, 1)] == [132 - 40, 0]
    assert budget.take_drafts(0, -3) == 0
