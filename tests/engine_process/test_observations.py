from __future__ import annotations

import itertools

import pytest

from naiad.engine_process.observations import Ended, ForwardedObservations, ObservationBatch, Observations
from naiad.outputs import EngineStats, RequestOutput, Timings, error_output
from naiad.sequence import BeamParams, EngineRequest, FinishReason, SamplingParams
from naiad.triton_server.service.lasting_stats import LastingStats

TIMINGS = Timings(1.0, 2.0, 3.0, 4.0)


def request(*ids: int, beam: BeamParams | None = None) -> EngineRequest:
    return EngineRequest(
        sequence_id=ids[0],
        sibling_ids=ids[1:],
        prompt_token_ids=[5, 6, 7],
        params=SamplingParams(max_tokens=4),
        beam=beam,
    )


def last(sequence_id: int, *ids: int, reason: FinishReason = FinishReason.LENGTH) -> RequestOutput:
    return RequestOutput(sequence_id, list(ids), finish_reason=reason, timings=TIMINGS)


@pytest.fixture
def observations() -> Observations:
    ticks = itertools.count(10.0)
    return Observations(lambda: next(ticks))


def test_a_sequence_is_reported_once_with_all_its_tokens(observations: Observations) -> None:
    observations.begin([request(1)], 1)
    observations.take_outputs([RequestOutput(1, [8])])
    assert observations.take().ended == []
    observations.take_outputs([last(1, 9, 10)])
    assert observations.take().ended == [Ended(FinishReason.LENGTH, 2.0, TIMINGS, 3, 3, 1)]
    assert observations.take().ended == []


def test_gaps_are_of_tokens_whether_they_are_streamed_or_not(observations: Observations) -> None:
    """The clock advances by one with each call, starting at 10."""
    observations.begin([request(1)], 1)
    observations.take_outputs([RequestOutput(1, [])])
    observations.take_outputs([RequestOutput(1, [8])])
    observations.take_outputs([RequestOutput(1, [9, 10])])
    observations.take_outputs([last(1, 11)])
    batch = observations.take()
    assert (batch.first_token_s, batch.gaps) == ([2.0], [(0.5, 2), (1.0, 1)])


def test_siblings_are_told_apart_and_their_number_once(observations: Observations) -> None:
    observations.begin([request(1, 2)], 2)
    observations.take_outputs([last(2, 8), last(1, 8, 9)])
    ended = observations.take().ended
    assert [(each.num_output_tokens, each.num_sequences) for each in ended] == [(1, 0), (2, 2)]


def test_a_search_is_one(observations: Observations) -> None:
    observations.begin([request(1, 2, 3, beam=BeamParams())], 2)
    observations.take_outputs([last(1, 8, reason=FinishReason.STOP), last(2, 8, 9), last(3)])
    (ended,) = observations.take().ended
    assert (ended.reason, ended.num_output_tokens, ended.num_sequences) == (FinishReason.STOP, 3, 2)


def test_refused_requests_are_not_reported(observations: Observations) -> None:
    observations.begin([request(1), request(2)], 1)
    observations.take_outputs([error_output(1, "UNAVAILABLE", "the queue is full")])
    observations.forget([request(2)])
    observations.lose()
    assert observations.take().ended == []


@pytest.mark.parametrize(("lost", "num_lost"), [(None, 2), ([2, 7], 1)])
def test_sequences_lost_with_the_engine_end_with_an_error(
    observations: Observations, lost: list[int] | None, num_lost: int
) -> None:
    observations.begin([request(1), request(2), request(3)], 1)
    observations.take_outputs([last(3), RequestOutput(2, [8])])
    observations.take()
    observations.lose(lost)
    ended = observations.take().ended
    assert [each.reason for each in ended] == [FinishReason.ERROR] * num_lost
    assert [each.has_begun for each in ended][-1]
    observations.take_outputs([last(2)])
    assert observations.take().ended == []


def test_totals_continue_when_the_engine_restarts() -> None:
    lasting = LastingStats()
    seen = []
    for stats in (EngineStats(total_steps=5), EngineStats(total_steps=9, num_running=3), None):
        lasting.lose() if stats is None else lasting.take(stats)
        seen.append((lasting.now().total_steps, lasting.now().num_running))
    # The new engine has more steps than the old one before the stats are read.
    lasting.take(EngineStats(total_steps=40, total_accepted_tokens_at=[2, 1]))
    lasting.lose()
    lasting.take(EngineStats(total_steps=2, total_accepted_tokens_at=[1, 1, 1]))
    assert seen == [(5, 0), (9, 3), (9, 0)]
    assert lasting.now().total_steps == 9 + 40 + 2
    assert lasting.now().total_accepted_tokens_at == [3, 2, 1]


def test_forwarded_batches_are_taken_once_and_together() -> None:
    forwarded = ForwardedObservations()
    forwarded.add(ObservationBatch([0.5], [(0.25, 2)]))
    forwarded.add(ObservationBatch([0.75]))
    assert forwarded.take() == ObservationBatch([0.5, 0.75], [(0.25, 2)])
    assert forwarded.take() == ObservationBatch()
