"""A lone stream is sent in the thread that has its output; no stream is sent by two threads at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from naiad.frontend.request import GenerateRequest
from naiad.triton_server.responses.stream import ResponseStream, StreamRow
from naiad.triton_server.service.sender_pool import SenderPool


class Flushes:
    """Notes which thread has flushed which stream, and what it has taken; may be held up."""

    def __init__(self) -> None:
        self.threads: dict[int, list[str]] = {}
        self.pending: dict[int, list[int]] = {}
        self.sent: dict[int, list[int]] = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_begun = threading.Event()
        self.num_inside = [0, 0]

    def __call__(self, stream: ResponseStream) -> None:
        number = stream.rows[0].sequence_id
        self.num_inside[number % 2] += 1
        assert self.num_inside[number % 2] == 1
        self.threads.setdefault(number, []).append(threading.current_thread().name)
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        taken = self.pending.get(number, [])
        while taken:
            self.sent.setdefault(number, []).append(taken.pop(0))
        self.num_inside[number % 2] -= 1


class NoSender:
    """Sends nothing."""


def stream_of(number: int) -> ResponseStream:
    request = GenerateRequest.__new__(GenerateRequest)
    return ResponseStream(request, NoSender(), [StreamRow(0, number)], False)  # type: ignore[arg-type]


@pytest.fixture
def flushes() -> Flushes:
    return Flushes()


@pytest.fixture
def pool(flushes: Flushes) -> Iterator[SenderPool]:
    made = SenderPool(2, flushes)
    yield made
    flushes.may_go_on.set()
    made.close()


def test_a_lone_stream_is_flushed_in_the_calling_thread(pool: SenderPool, flushes: Flushes) -> None:
    pool.send([stream_of(7)])
    assert flushes.threads == {7: [threading.current_thread().name]}


def test_several_streams_are_flushed_in_the_threads_of_their_lanes(
    pool: SenderPool, flushes: Flushes
) -> None:
    pool.send([stream_of(6), stream_of(7), stream_of(8)])
    pool.close()
    assert flushes.threads == {6: ["naiad-sender-0"], 8: ["naiad-sender-0"], 7: ["naiad-sender-1"]}


def test_no_streams_are_no_work(pool: SenderPool, flushes: Flushes) -> None:
    pool.send([])
    assert flushes.threads == {}


def test_a_lone_stream_does_not_wait_for_another_of_its_lane(pool: SenderPool, flushes: Flushes) -> None:
    flushes.may_go_on.clear()
    pool.schedule(stream_of(6))
    assert flushes.has_begun.wait(30)
    pool.send([stream_of(8)])
    assert flushes.threads == {6: ["naiad-sender-0"]}
    flushes.may_go_on.set()
    pool.close()
    assert flushes.threads[8] == ["naiad-sender-0"]


def test_a_stream_that_its_thread_is_flushing_is_flushed_again(pool: SenderPool, flushes: Flushes) -> None:
    """What comes while a thread flushes may have come too late for it."""
    flushes.may_go_on.clear()
    stream = stream_of(6)
    pool.schedule(stream)
    assert flushes.has_begun.wait(30)
    pool.send([stream])
    flushes.may_go_on.set()
    pool.close()
    assert flushes.threads == {6: ["naiad-sender-0"] * 2}


def test_everything_is_sent_in_order_whoever_sends_it() -> None:
    """The calling thread and both lanes' own threads flush the same five streams."""
    flushes, draw = Flushes(), random.Random(0)
    pool = SenderPool(2, flushes)
    streams = [stream_of(number) for number in range(5)]
    for value in range(20_000):
        touched = draw.sample(streams, draw.choice((1, 1, 1, 2, 5)))
        for stream in touched:
            flushes.pending.setdefault(stream.rows[0].sequence_id, []).append(value)
        if draw.random() < 0.3:
            pool.schedule(*touched)
        else:
            pool.send(touched)
    pool.close()
    assert not any(flushes.pending.values())
    assert all(sent == sorted(sent) for sent in flushes.sent.values())
    assert {name for names in flushes.threads.values() for name in names} == {
        "naiad-sender-0",
        "naiad-sender-1",
        threading.current_thread().name,
    }
