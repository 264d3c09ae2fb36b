"""Acknowledgements are read when something waits for one, and otherwise with what comes anyway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.triton_server_doubles import (
    LIMITS,
    LLM_SHAPE,
    CountedIds,
    FakeEngineClient,
    FakeSender,
    let_senders_finish,
    llm_source,
)
from naiad.engine_process import AckReceiver, AckSender
from naiad.outputs import EngineStats, RequestOutput, error_output
from naiad.sequence import FinishReason
from naiad.triton_server.responses import stream
from naiad.triton_server.service import llm_service
from naiad.triton_server.service.ack_reader import AckReader
from naiad.triton_server.service.llm_service import LLMService

TEXT = b'{"prompt_tail_ids": [7], "num_prompt_chars": 3}'


class Harness:
    """A service over a fake engine, whose acknowledgements come through a real socket."""

    def __init__(self, path: Path) -> None:
        self.service = LLMService(FakeEngineClient(), pytest.fail, CountedIds(), LLM_SHAPE)
        self.reader = AckReader(AckReceiver(path), self.service)
        self.detokenizer = AckSender(path)
        self.client = FakeSender()
        self.service.accept(llm_source(text_context=TEXT, streaming=True), self.client, LIMITS)

    def say(self, *tokens: int) -> None:
        for token in tokens:
            self.service.take_outputs([RequestOutput(1, [token], window_ids=[7])], EngineStats())
            let_senders_finish(self.service)

    @property
    def num_outstanding(self) -> int:
        (asked,) = self.service.open_streams()
        return asked.rows[0].outstanding

    def close(self) -> None:
        self.detokenizer.close()
        self.service.close()
        self.reader.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "acks")
    yield made
    made.close()


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "did not happen"
        time.sleep(0.002)


def test_a_full_window_is_opened_by_the_thread(harness: Harness) -> None:
    harness.say(10, 11, 12)
    assert len(harness.client.responses) == 2
    harness.detokenizer.send(1, 1, False)
    eventually(lambda: len(harness.client.responses) == 3)
    eventually(lambda: not harness.service.needs_acks)


def test_others_are_read_with_the_next_message_of_the_engine(harness: Harness) -> None:
    harness.say(10)
    harness.detokenizer.send(1, 1, False)
    assert harness.num_outstanding == 1
    harness.say(11)
    assert harness.num_outstanding == 1
    harness.detokenizer.send(1, 1, False)
    harness.service.housekeep()
    assert harness.num_outstanding == 0


def test_a_client_that_is_gone_is_heard_of_in_the_next_round(harness: Harness) -> None:
    harness.say(10)
    harness.detokenizer.send(1, 1, True)
    harness.service.housekeep()
    (asked,) = harness.service.open_streams()
    assert asked.is_cancelling


def test_an_answer_to_a_probe_is_heard_at_once(harness: Harness) -> None:
    (asked,) = harness.service.open_streams()

    def is_probed() -> bool:
        harness.service.housekeep()
        return len(harness.client.responses) == 1

    eventually(is_probed)
    harness.detokenizer.send(1, 1, True)
    eventually(lambda: asked.is_cancelling)
    eventually(lambda: not harness.service.needs_acks)


def test_an_error_is_sent_as_soon_as_the_chunks_before_it_have_arrived(harness: Harness) -> None:
    harness.say(10)
    harness.service.take_outputs([error_output(1, "INTERNAL", "bad row")], EngineStats())
    let_senders_finish(harness.service)
    assert harness.client.num_finals == 0
    harness.detokenizer.send(1, 1, False)
    eventually(lambda: harness.client.num_finals == 1)
    eventually(lambda: not harness.service.needs_acks)


@pytest.mark.parametrize("end", ["engine lost", "dead detokenizer", "failed response"])
def test_nothing_is_urgent_for_a_stream_that_has_ended(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    harness.say(10, 11, 12)
    assert harness.service.needs_acks
    if end == "engine lost":
        harness.service.engine_lost()
    elif end == "dead detokenizer":
        monkeypatch.setattr(llm_service, "DEAD_DETOKENIZER_S", -1.0)
        harness.service.housekeep()
    else:
        harness.service._log_error = lambda _line: None
        monkeypatch.setattr(harness.client, "send", lambda *_, **__: 1 / 0)
        harness.service.take_outputs([RequestOutput(1, [13], finish_reason=FinishReason.STOP)], EngineStats())
    monkeypatch.setattr(stream, "ERROR_PATIENCE_S", 0.0)

    def is_over() -> bool:
        harness.service.housekeep()
        return harness.client.num_finals == 1

    eventually(is_over)
    let_senders_finish(harness.service)
    assert harness.service.open_streams() == []
    assert not harness.service.needs_acks


def test_a_closed_reader_brings_nothing(harness: Harness) -> None:
    harness.reader.close()
    harness.say(10, 11, 12)
    harness.service.housekeep()
    assert harness.num_outstanding == 2


def test_a_closed_receiver_has_nothing(tmp_path: Path) -> None:
    receiver = AckReceiver(tmp_path / "acks")
    receiver.close()
    assert receiver.receive() == []


def test_what_many_threads_read_is_taken_once(tmp_path: Path) -> None:
    receiver, sender = AckReceiver(tmp_path / "acks"), AckSender(tmp_path / "acks")
    taken: list[int] = []

    def read() -> None:
        while len(taken) < 2000:
            taken.extend(ack.sequence_id for ack in receiver.receive(0.01))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for each in threads:
        each.start()
    for number in range(2000):
        sender.send(number, 1, False)
    # What a full socket has delayed goes with a later one.
    end_s = time.monotonic() + 30
    while sender._waiting and time.monotonic() < end_s:
        with sender._lock:
            try:
                sender._send_waiting()
            except BlockingIOError:
                time.sleep(0.001)
    for each in threads:
        each.join(30)
    sender.close()
    receiver.close()
    assert sorted(taken) == list(range(2000))
