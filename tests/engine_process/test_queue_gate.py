from __future__ import annotations

import pytest

from naiad.engine_process.serving.queue_gate import QueueGate, QueueLimits
from naiad.errors import InvalidRequestError, UnavailableError
from naiad.sequence import BeamParams, EngineRequest, SamplingParams


def make_request(num_tokens: int = 1, num_siblings: int = 0, beam: BeamParams | None = None) -> EngineRequest:
    return EngineRequest(
        sequence_id=1,
        prompt_token_ids=[1] * num_tokens,
        params=SamplingParams(max_tokens=1),
        sibling_ids=tuple(range(2, 2 + num_siblings)),
        beam=beam,
    )


def test_exactly_those_that_run_or_may_wait_come_in() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=3, max_queued_requests=4))
    for _ in range(7):
        gate.enter([make_request()])
    for _ in range(13):
        with pytest.raises(UnavailableError, match="7 sequences run or wait, at most 7 may"):
            gate.enter([make_request()])


def test_who_leaves_makes_room_for_one() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=1, max_queued_requests=0))
    gate.enter([make_request()])
    with pytest.raises(UnavailableError):
        gate.enter([make_request()])
    gate.leave()
    gate.enter([make_request()])


def test_a_request_comes_in_whole_or_not_at_all() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=2, max_queued_requests=3))
    gate.enter([make_request()])
    with pytest.raises(UnavailableError):
        gate.enter([make_request(num_siblings=2), make_request(num_siblings=1)])
    gate.enter([make_request(num_siblings=3)])


def test_requests_that_never_fit_are_refused_as_invalid() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=8, max_queued_requests=16))
    message = (
        "the request asks for 32 sequences at once, its prompts times n, num_return_sequences or beam_width: "
        r"expected at most 24 \(max_num_seqs = 8 and max_queued_requests = 16\)"
    )
    with pytest.raises(InvalidRequestError, match=message):
        gate.enter([make_request(num_siblings=15), make_request(num_siblings=15)])


def test_beams_that_can_never_run_are_refused_as_invalid_even_when_the_queue_is_full() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=2, max_queued_requests=1))
    gate.enter([make_request(num_siblings=2)])
    with pytest.raises(InvalidRequestError, match="beam_width = 3: expected at most max_num_seqs = 2"):
        gate.enter([make_request(num_siblings=2, beam=BeamParams())])


def test_tokens_that_wait_are_bounded_but_one_prompt_may_always_wait() -> None:
    gate = QueueGate(QueueLimits(1, 100, max_queued_tokens=10))
    gate.enter([make_request(num_tokens=50)])
    with pytest.raises(UnavailableError, match="50 prompt tokens wait and 1 more would come"):
        gate.enter([make_request()])
    gate.arrived([make_request(num_tokens=50)], num_waiting_tokens=4)
    gate.enter([make_request(num_tokens=6)])
    with pytest.raises(UnavailableError):
        gate.enter([make_request()])


def test_a_closed_gate_says_why() -> None:
    gate = QueueGate(QueueLimits(max_num_seqs=1, max_queued_requests=0))
    gate.close("the server is shutting down")
    with pytest.raises(UnavailableError, match=r"^the server is shutting down$"):
        gate.enter([make_request()])
