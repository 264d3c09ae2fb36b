from __future__ import annotations

import pytest

from naiad.scheduler.policies import FirstComeFirstServed, PriorityFirst, ShortestPromptFirst, make_policy
from naiad.sequence import SamplingParams, Sequence


def make_sequence(arrival_s: float, priority: int = 0, num_tokens: int = 1) -> Sequence:
    params = SamplingParams(max_tokens=1, priority=priority)
    return Sequence(1, [1] * num_tokens, num_tokens, params, arrival_s)


def test_first_come_first_served_looks_at_nothing_else() -> None:
    policy = FirstComeFirstServed()
    assert policy.rank(make_sequence(1.0, priority=9, num_tokens=50)) == 1.0
    assert not policy.may_preempt(make_sequence(0.0, -5), make_sequence(1.0, 5))


def test_a_unit_of_priority_is_worth_the_aging_time() -> None:
    policy = PriorityFirst(aging_s=10.0)
    low = policy.rank(make_sequence(100.0, priority=1))
    assert policy.rank(make_sequence(109.9, priority=0)) < low
    assert policy.rank(make_sequence(110.1, priority=0)) > low


def test_only_a_larger_priority_number_is_preempted() -> None:
    policy = PriorityFirst(aging_s=10.0)
    assert policy.may_preempt(make_sequence(5.0, -1), make_sequence(0.0, 0))
    assert not policy.may_preempt(make_sequence(5.0, 0), make_sequence(0.0, 0))


def test_a_short_prompt_overtakes_within_the_aging_time() -> None:
    policy = ShortestPromptFirst(token_s=0.1)
    long = policy.rank(make_sequence(0.0, num_tokens=101))
    assert policy.rank(make_sequence(9.9, num_tokens=1)) < long
    assert policy.rank(make_sequence(10.1, num_tokens=1)) > long


@pytest.mark.parametrize("name", ["fcfs", "priority", "shortest_prompt"])
def test_equal_requests_go_by_arrival(name: str) -> None:
    policy = make_policy(name, 10.0)
    assert policy.rank(make_sequence(1.0)) < policy.rank(make_sequence(2.0))
