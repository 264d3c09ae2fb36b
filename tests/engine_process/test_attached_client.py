"""Clients of an engine that another process owns: it is found, lost and found again."""

from __future__ import annotations

import errno
import os
import selectors
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.engine_harness import Recorder, fake_command, make_request, wait_until
from helpers.fake_engine_child import HELD_ID, REFUSED_ID, SLOW_ID, let_go
from naiad.config import EngineConfig
from naiad.engine_process import AttachedClient, EngineClient, instance
from naiad.engine_process.clients import attached_client
from naiad.engine_process.clients.engine_connection import EngineConnection
from naiad.engine_process.observations import Ended, ObservationBatch
from naiad.errors import InternalError, UnavailableError
from naiad.outputs import EngineStats, RequestOutput, Timings
from naiad.sequence import FinishReason

StartOwner = Callable[[str], EngineClient]


class Visitor:
    """An attached client and what it reported."""

    def __init__(self, directory: Path, starts: bool = True) -> None:
        self.recorder = Recorder()
        self.lost: list[list[int]] = []
        self.stopped: list[str] = []
        self.client = AttachedClient(
            directory, "llm", self.recorder.on_outputs, self.lost.append, self.stopped.append
        )
        if starts:
            self.client.start()

    def wait_until_served(self) -> None:
        wait_until(lambda: self.client.info is not None)


class FullSelector(selectors.DefaultSelector):
    """Refuses the first connections, as the kernel does when nothing more can be watched."""

    def __init__(self, num_refused: int) -> None:
        super().__init__()
        self.refused: list[EngineConnection] = []
        self._num_refused = num_refused

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if len(self.refused) < self._num_refused:
            self.refused.append(fileobj)
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().register(fileobj, events, data)


class Clock:
    now_s = 0.0


Visit = Callable[[], Visitor]


@pytest.fixture
def visit(socket_dir: Path) -> Iterator[Visit]:
    """Makes an attached client.

    An engine treats the first connection from its parent as its owner's. Here one process makes all
    connections, so the owner must connect first where it matters.
    """
    visitors: list[Visitor] = []

    def make() -> Visitor:
        visitors.append(Visitor(socket_dir))
        return visitors[-1]

    yield make
    for visitor in visitors:
        visitor.client.close()


@pytest.fixture
def start_owner(socket_dir: Path) -> Iterator[StartOwner]:
    """Starts the engine with a socket's name, as the `llm` model does."""
    owners: list[EngineClient] = []

    def start(name: str) -> EngineClient:
        recorder = Recorder()
        owner = EngineClient(
            EngineConfig(model_dir=str(socket_dir)),
            socket_dir / name,
            recorder.on_outputs,
            recorder.on_lost,
            command=fake_command("good"),
        )
        owners.append(owner)
        owner.start()
        return owner

    yield start
    for owner in owners:
        owner.close(timeout_s=0)


def test_without_an_engine_requests_are_unavailable(visit: Visit) -> None:
    visitor = visit()
    assert visitor.client.info is None
    with pytest.raises(UnavailableError, match="the engine of the model llm does not serve now"):
        visitor.client.submit([make_request(1, first_id=4)])


def test_an_engine_that_comes_later_serves(visit: Visit, start_owner: StartOwner) -> None:
    visitor = visit()
    start_owner("llm.0.engine")
    visitor.wait_until_served()
    assert visitor.client.info is not None
    assert visitor.client.info.vocab_size == 1000
    visitor.client.submit([make_request(1, first_id=4), make_request(2, REFUSED_ID)])
    visitor.recorder.wait_finished(1, 2)
    assert visitor.recorder.token_ids(1) == [4, 5, 6]
    assert visitor.recorder.outputs[2][0].error_status == "INVALID_ARG"


def test_the_engine_of_another_model_is_not_taken(visit: Visit, start_owner: StartOwner) -> None:
    start_owner("llm.other.0.engine")
    start_owner("llm.1.engine")
    visitor = visit()
    visitor.wait_until_served()
    assert [path.name for path in visitor.client._engines] == ["llm.1.engine"]


def test_an_abort_ends_a_sequence_of_its_own(visit: Visit, start_owner: StartOwner) -> None:
    start_owner("llm.0.engine")
    visitor = visit()
    visitor.wait_until_served()
    visitor.client.submit([make_request(1, SLOW_ID, max_tokens=10_000)])
    visitor.recorder.wait_started(1)
    visitor.client.abort([1, 77])
    visitor.recorder.wait_finished(1)
    assert visitor.recorder.reason(1) is FinishReason.CANCELLED


def test_a_lost_engine_is_reported_once_and_the_next_one_serves(
    visit: Visit, start_owner: StartOwner
) -> None:
    owner = start_owner("llm.0.engine")
    visitor = visit()
    visitor.wait_until_served()
    visitor.client.submit([make_request(1, SLOW_ID, max_tokens=10_000), make_request(2, first_id=4)])
    visitor.recorder.wait_finished(2)
    assert owner.pid is not None
    os.kill(owner.pid, 9)
    wait_until(lambda: visitor.lost == [[1]])
    wait_until(lambda: owner.is_ready)
    visitor.wait_until_served()
    visitor.client.submit([make_request(3, first_id=4)])
    visitor.recorder.wait_finished(3)
    assert visitor.lost == [[1]]


def test_the_newest_engine_takes_what_is_new_and_the_old_ends_its_own(
    visit: Visit, start_owner: StartOwner, socket_dir: Path
) -> None:
    old = start_owner("llm.0.engine")
    visitor = visit()
    visitor.wait_until_served()
    visitor.client.submit([make_request(1, HELD_ID)])
    visitor.recorder.wait_started(1)
    start_owner("llm.1.engine")
    wait_until(lambda: sum(each.info is not None for each in list(visitor.client._engines.values())) == 2)
    assert visitor.recorder.reason(1) is None
    let_go(socket_dir)
    old.close(timeout_s=20)
    visitor.recorder.wait_finished(1)
    assert visitor.recorder.reason(1) is FinishReason.LENGTH
    visitor.client.submit([make_request(2, first_id=4)])
    visitor.recorder.wait_finished(2)
    assert visitor.lost == []


def test_the_newest_engine_is_told_without_the_clock_of_the_wall(
    visit: Visit, start_owner: StartOwner, socket_dir: Path
) -> None:
    start_owner("llm.0.engine")
    # The clock is set back after this one has started.
    later_s = time.time() + 3600
    os.utime(socket_dir / "llm.0.engine", (later_s, later_s))
    start_owner("llm.1.engine")
    visitor = visit()
    wait_until(lambda: sum(each.info is not None for each in list(visitor.client._engines.values())) == 2)
    newest = visitor.client._newest()
    assert newest is not None
    assert newest.path.name == "llm.1.engine"


def test_a_directory_that_can_not_be_read_is_read_again(
    visit: Visit,
    start_owner: StartOwner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_looks = 0

    def engine_sockets(directory: Path, model: str | None) -> list[Path]:
        nonlocal num_looks
        num_looks += 1
        if num_looks <= 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return instance.engine_sockets(directory, model)

    monkeypatch.setattr(attached_client, "engine_sockets", engine_sockets)
    start_owner("llm.0.engine")
    visitor = visit()
    visitor.wait_until_served()
    assert caplog.messages == ["an engine can not be looked for; this is tried again: Too many open files"]


def test_an_engine_that_can_not_be_watched_is_connected_to_again(
    socket_dir: Path, start_owner: StartOwner
) -> None:
    start_owner("llm.0.engine")
    visitor = Visitor(socket_dir, starts=False)
    selector = FullSelector(3)
    visitor.client._selector = selector
    visitor.client.start()
    try:
        visitor.wait_until_served()
        # Connections that could not be watched are closed.
        assert all(connection.fileno() == -1 for connection in selector.refused)
        assert len(selector.refused) == 3
        visitor.client.submit([make_request(1, first_id=4)])
        visitor.recorder.wait_finished(1)
    finally:
        visitor.client.close()


def test_outputs_that_can_not_be_taken_end_their_sequences_alone(
    visit: Visit, start_owner: StartOwner, caplog: pytest.LogCaptureFixture
) -> None:
    owner = start_owner("llm.0.engine")
    visitor = visit()
    visitor.wait_until_served()
    take = visitor.recorder.on_outputs

    def take_or_fail(outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        if any(output.sequence_id == 1 and output.token_ids == [SLOW_ID] for output in outputs):
            raise KeyError("a secret detail")
        take(outputs, stats)

    visitor.client._on_outputs = take_or_fail
    visitor.client.submit([make_request(1, SLOW_ID, max_tokens=10**6)])
    visitor.recorder.wait_finished(1)
    assert visitor.recorder.outputs[1][0].error_status == "INTERNAL"
    # It was accepted, so it counts.
    assert visitor.recorder.outputs[1][0].timings is not None
    visitor.client.submit([make_request(2, first_id=4)])
    visitor.recorder.wait_finished(2)
    assert visitor.recorder.token_ids(2) == [4, 5, 6]
    assert visitor.lost == []
    (said,) = caplog.messages
    assert said.startswith("what the engine has sent could not be taken: KeyError at engine_process/test_")
    # The drain waits for every client's sequences; the one that failed is aborted.
    owner.close(timeout_s=20)
    assert owner.pid is None


def test_an_engine_that_does_not_come_is_looked_for_less_often(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(attached_client, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    looks: list[float] = []

    def engine_sockets(_directory: Path, _model: str | None) -> list[Path]:
        looks.append(clock.now_s)
        return []

    monkeypatch.setattr(attached_client, "engine_sockets", engine_sockets)
    client = Visitor(socket_dir, starts=False).client
    while clock.now_s < 30.0:
        client._look()
        clock.now_s = client._next_look_s
    assert sum(each < 9.99 for each in looks) == pytest.approx(500, abs=2)
    assert sum(each > 10.01 for each in looks) == pytest.approx(100, abs=2)


def test_requests_are_stopped_through_every_other_client(visit: Visit, start_owner: StartOwner) -> None:
    owner = start_owner("llm.0.engine")
    told: list[str] = []
    owner.on_stop = told.append
    visitor, third = visit(), visit()
    visitor.wait_until_served()
    third.wait_until_served()
    visitor.client.stop_others("seven")
    wait_until(lambda: third.stopped == ["seven"])
    owner.stop_others("eight")
    wait_until(lambda: third.stopped == ["seven", "eight"])
    wait_until(lambda: (told, visitor.stopped) == (["seven"], ["eight"]))


def test_observations_reach_the_owner_alone(visit: Visit, start_owner: StartOwner) -> None:
    owner = start_owner("llm.0.engine")
    told: list[ObservationBatch] = []
    owner.on_observed = told.append
    visitor, third = visit(), visit()
    visitor.wait_until_served()
    third.wait_until_served()
    ended = Ended(FinishReason.LENGTH, 2.0, Timings(1.0, 2.0, 3.0, 4.0), 5, 6, 1)
    visitor.client.report(ObservationBatch([0.25], [(0.5, 3)], [ended]))
    third.client.report(ObservationBatch([0.75]))
    wait_until(lambda: len(told) == 2)
    assert told == [ObservationBatch([0.25], [(0.5, 3)], [ended]), ObservationBatch([0.75])]
    # Both clients still work.
    for each in (visitor, third):
        each.client.submit([make_request(1, first_id=4)])
        each.recorder.wait_finished(1)


def test_observations_are_dropped_while_there_is_no_engine(visit: Visit) -> None:
    visitor = visit()
    visitor.client.report(ObservationBatch([0.25]))
    assert visitor.client.info is None


def test_closing_gives_its_sequences_back(visit: Visit, start_owner: StartOwner) -> None:
    owner = start_owner("llm.0.engine")
    visitor = visit()
    visitor.wait_until_served()
    visitor.client.submit([make_request(1, SLOW_ID, max_tokens=10_000)])
    visitor.recorder.wait_started(1)
    visitor.client.close()
    assert visitor.lost == [[1]]
    with pytest.raises(UnavailableError):
        visitor.client.submit([make_request(2, first_id=4)])
    # The owner's drain waits for every client's sequences; here it ends immediately.
    owner.close(timeout_s=20)
    assert owner.pid is None


def test_what_can_not_be_sent_leaves_nothing_behind(
    visit: Visit, start_owner: StartOwner, caplog: pytest.LogCaptureFixture
) -> None:
    start_owner("llm.0.engine")
    visitor = visit()
    visitor.wait_until_served()
    with pytest.raises(InternalError, match="can not be sent to the engine"):
        visitor.client.submit([make_request(1, first_id=2**64)])
    visitor.client.close()
    assert visitor.lost == []
    (said,) = caplog.messages
    assert said.startswith("a request can not be sent to the engine: OverflowError at engine_process/")
