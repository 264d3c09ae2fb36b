"""Which clients are checked first, and how many in a round."""

from __future__ import annotations

from itertools import pairwise

import pytest

from helpers.triton_server_doubles import LIMITS, LLM_SHAPE, FakeSender, llm_source
from naiad.errors import InternalError
from naiad.frontend.request import GenerateRequest
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import FinishReason
from naiad.triton_server.requests.llm import read_request
from naiad.triton_server.responses.stream import ResponseStream, StreamRow
from naiad.triton_server.service.client_watch import (
    CHECK_PERIOD_S,
    LONGEST_IN_QUEUE_S,
    LONGEST_S,
    MAX_POLLS,
    MAX_PROBES,
    ROUND_S,
    StepPace,
    streams_to_poll,
    streams_to_probe,
)

NOW_S = 1000.0


def new_streams(count: int, *, has_detokenizer: bool, has_begun: bool = True) -> list[ResponseStream]:
    """Streams of one row each; the first has been silent the longest."""
    request = read_request(llm_source(), LIMITS)
    assert isinstance(request, GenerateRequest)
    streams = [
        ResponseStream(request, FakeSender(), [StreamRow(0, i, has_started=has_begun)], has_detokenizer)
        for i in range(count)
    ]
    for age, stream in enumerate(reversed(streams)):
        stream.last_sent_s = NOW_S - CHECK_PERIOD_S - age / 1e6
    return streams


def test_the_longest_silent_are_probed_first_and_not_all_at_once() -> None:
    streams = new_streams(20, has_detokenizer=True)
    assert streams_to_probe(streams[::-1], NOW_S) == streams[:MAX_PROBES]


def test_thirty_two_silent_clients_are_all_checked_within_80_ms() -> None:
    streams = new_streams(32, has_detokenizer=True)
    asked: set[int] = set()
    now_s = NOW_S
    while now_s < NOW_S + 0.08 - ROUND_S / 2:
        for stream in streams_to_probe(streams, now_s):
            stream.last_sent_s = now_s
            asked.add(id(stream))
        now_s += ROUND_S
    assert len(asked) == 32


@pytest.mark.parametrize(("num_queued", "expected_s"), [(1, CHECK_PERIOD_S), (2, 0.1), (32, 1.6), (400, 2.0)])
def test_queued_requests_share_twenty_checks_a_second(num_queued: int, expected_s: float) -> None:
    streams = new_streams(num_queued, has_detokenizer=True, has_begun=False)
    direct = new_streams(num_queued, has_detokenizer=False, has_begun=False)
    begun = new_streams(1, has_detokenizer=True)
    for silent_s, is_asked in ((expected_s - 0.001, False), (expected_s + 0.001, True)):
        for stream in (*streams, *direct, *begun):
            stream.last_sent_s = stream.last_polled_s = NOW_S - silent_s
        asked = streams_to_probe([*streams, *begun], NOW_S)
        assert (begun[0] in asked) == (silent_s >= CHECK_PERIOD_S)
        assert any(stream in asked for stream in streams) == is_asked
        if num_queued > 1:
            assert bool(streams_to_poll(direct, NOW_S)) == is_asked


@pytest.mark.parametrize("num_queued", [8, 68, 200, 1000])
@pytest.mark.parametrize("has_detokenizer", [True, False])
def test_a_long_queue_does_not_delay_streams_that_have_begun(num_queued: int, has_detokenizer: bool) -> None:
    streams = new_streams(32, has_detokenizer=has_detokenizer)
    streams += new_streams(num_queued, has_detokenizer=has_detokenizer, has_begun=False)
    for stream in streams:
        stream.last_polled_s = stream.last_sent_s = NOW_S
    choose = streams_to_probe if has_detokenizer else streams_to_poll
    asked_at_s: dict[int, float] = {}
    gaps_s: dict[int, float] = {}
    num_rounds = 250
    for number in range(1, num_rounds):
        now_s = NOW_S + number * ROUND_S
        for stream in choose(streams, now_s):
            place = stream.rows[0].sequence_id + 32 * (not stream.has_begun)
            gaps_s[place] = max(gaps_s.get(place, 0.0), now_s - asked_at_s.get(place, NOW_S))
            asked_at_s[place] = stream.last_polled_s = stream.last_sent_s = now_s
    assert max(gaps_s[place] for place in range(32)) < CHECK_PERIOD_S + 4 * ROUND_S
    if num_queued <= 200:
        assert len(gaps_s) == 32 + num_queued
        assert max(gaps_s.values()) <= LONGEST_IN_QUEUE_S * 2


@pytest.mark.parametrize("state", ["spoken", "waiting for acks", "cancelling", "closed", "failed", "direct"])
def test_streams_that_need_no_probe_get_none(state: str) -> None:
    stream = new_streams(1, has_detokenizer=state != "direct")[0]
    if state == "spoken":
        stream.last_sent_s = NOW_S - CHECK_PERIOD_S / 2
    stream.rows[0].outstanding = int(state == "waiting for acks")
    stream.is_cancelling = state == "cancelling"
    stream.is_closed = state == "closed"
    if state == "failed":
        stream.fail(InternalError("x"))
    assert streams_to_probe([stream], NOW_S) == []


def test_direct_streams_take_turns() -> None:
    streams = new_streams(3 * MAX_POLLS, has_detokenizer=False)
    polled = []
    for number in range(3):
        batch = streams_to_poll(streams, NOW_S)
        for stream in batch:
            stream.last_polled_s = NOW_S + number
        polled += batch
    assert polled == streams


def test_a_client_that_goes_is_noticed_within_100_ms_and_none_is_polled_in_every_short_step() -> None:
    streams = new_streams(32, has_detokenizer=False)
    polled_at_s: dict[int, list[float]] = {id(stream): [NOW_S] for stream in streams}
    for number in range(50):
        now_s = NOW_S + number * ROUND_S
        for stream in streams_to_poll(streams, now_s, step_s=0.01):
            polled_at_s[id(stream)].append(now_s)
            stream.last_polled_s = now_s
    for times in polled_at_s.values():
        gaps = [later - earlier for earlier, later in pairwise(times[1:])]
        assert min(gaps) >= CHECK_PERIOD_S
        assert max(gaps) + ROUND_S <= 0.1 + 1e-9


def test_no_client_is_checked_twice_in_a_step() -> None:
    pace = StepPace()
    pace.take(EngineStats(total_steps=1, num_running=2), NOW_S)
    assert pace.period_s == 0
    pace.take(EngineStats(total_steps=3, num_running=2), NOW_S + 0.4)
    assert pace.period_s == pytest.approx(0.2)
    direct = new_streams(1, has_detokenizer=False)
    direct[0].last_polled_s = NOW_S
    assert streams_to_poll(direct, NOW_S + 0.19, pace.period_s) == []
    assert streams_to_poll(direct, NOW_S + 0.21, pace.period_s) == direct
    silent = new_streams(1, has_detokenizer=True)
    silent[0].last_sent_s = NOW_S
    assert streams_to_probe(silent, NOW_S + 0.19, pace.period_s) == []
    assert streams_to_probe(silent, NOW_S + 0.21, pace.period_s) == silent


def test_the_pace_is_that_of_steps_that_follow_each_other() -> None:
    pace = StepPace()
    pace.take(EngineStats(total_steps=1, num_running=1), NOW_S)
    pace.take(EngineStats(total_steps=2), NOW_S + 9)
    assert pace.period_s == LONGEST_S
    pace.take(EngineStats(total_steps=3, num_running=1), NOW_S + 10)  # the engine had been idle
    assert pace.period_s == 0
    pace.take(EngineStats(total_steps=4, num_running=1), NOW_S + 10.125)
    assert pace.period_s == pytest.approx(0.125)
    pace.take(EngineStats(total_steps=2, num_running=1), NOW_S + 11)  # another engine
    assert pace.period_s == 0


def test_streams_that_need_no_poll_get_none() -> None:
    streams = new_streams(3, has_detokenizer=False)
    streams[0].is_cancelling = True
    streams[1].is_closed = True
    streams[2].fail(InternalError("x"))
    assert streams_to_poll([*streams, *new_streams(1, has_detokenizer=True)], NOW_S) == []


def test_a_stream_that_has_begun_is_probed_after_a_longer_silence() -> None:
    """It gets a token in every step, and the acknowledgements replace probes."""
    request = read_request(llm_source(streaming=True), LIMITS)
    assert isinstance(request, GenerateRequest)
    prefilling, flowing = (
        ResponseStream(request, FakeSender(), [StreamRow(0, i, has_started=True)], True) for i in range(2)
    )
    flowing.rows[0].num_sent_chunks = 1
    for silent_s, expected in ((0.07, [prefilling]), (0.59, [prefilling]), (0.61, [prefilling, flowing])):
        prefilling.last_sent_s = flowing.last_sent_s = NOW_S - silent_s
        assert sorted(streams_to_probe([prefilling, flowing], NOW_S), key=id) == sorted(expected, key=id)


def test_a_pending_end_is_not_replaced_by_an_error() -> None:
    (stream,) = new_streams(1, has_detokenizer=False)
    stream.push(stream.rows[0], RequestOutput(0, [5], finish_reason=FinishReason.LENGTH), None)
    build = LLM_SHAPE.build
    assert stream._next(build, build) is not None
    stream.fail(InternalError("x"))
    assert stream.error is None


def test_a_start_is_known_and_nothing_is_sent() -> None:
    (stream,) = new_streams(1, has_detokenizer=False, has_begun=False)
    build = LLM_SHAPE.build
    stream.push(stream.rows[0], RequestOutput(0, []), None)
    assert stream.has_begun
    assert stream._next(build, build) is None
    stream.push(stream.rows[0], RequestOutput(0, [5], finish_reason=FinishReason.LENGTH), None)
    assert stream._next(build, build) is not None
