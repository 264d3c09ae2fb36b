from __future__ import annotations

from naiad.engine_process.queue_gate import QueueGate, QueueLimits
from naiad.sequence import EngineRequest, SamplingParams


def make_request(num_tokens: int = 1, num_siblings: int = 0) -> EngineRequest:
    return EngineRequest(
        sequence_id=1,
        prompt_token_ids=[1] * num_tokens,
        params=SamplingParams(max_tokens=1),
        sibling_ids=tuple(range(2, 2 + num_siblings)),
    )


def test_exactly_those_that_run_or_may_wait_come_in() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=3, max_queued_requests=4))
    answers = [gate.enter([make_request()]) for _ in range(20)]
    assert [answer == "" for answer in answers] == [True] * 7 + [False] * 13
    assert "7 sequences run or wait, at most 7 may" in answers[-1]


def test_who_leaves_makes_room_for_one() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=1, max_queued_requests=0))
    assert not gate.enter([make_request()])
    assert gate.enter([make_request()])
    gate.leave()
    assert not gate.enter([make_request()])


def test_a_request_comes_in_whole_or_not_at_all() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=2, max_queued_requests=2))
    assert gate.enter([make_request(num_siblings=2), make_request(num_siblings=1)])
    assert not gate.enter([make_request(num_siblings=3)])


def test_tokens_that_wait_are_bounded_but_one_prompt_may_always_wait() -> None:
    gate = QueueGate(QueueLimits(1, 100, max_queued_tokens=10))
    assert not gate.enter([make_request(num_tokens=50)])
    assert "50 prompt tokens wait and 1 more would come" in gate.enter([make_request()])
    gate.arrived([make_request(num_tokens=50)], num_waiting_tokens=4)
    assert not gate.enter([make_request(num_tokens=6)])
    assert gate.enter([make_request()])


def test_a_closed_gate_says_why() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=1, max_queued_requests=0))
    gate.close("the server is shutting down")
    assert gate.enter([make_request()]) == "the server is shutting down"
