"""Several connections to one engine process, well-behaved and not."""

from __future__ import annotations

import errno
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.engine_harness import WAIT_S, RawClient, Recorder, make_request, wait_until
from helpers.fake_engine_child import FAILING_ID, HELD_ID, LONG_ID, SLOW_ID, is_in_long_step, let_go
from naiad.engine_process import EngineClient
from naiad.engine_process.protocol import (
    Abort,
    AddRequests,
    Busy,
    Drain,
    Ready,
    StepDone,
    StopServing,
    encode_frame,
)
from naiad.engine_process.serving.connections import Connection
from naiad.frames import MAX_FRAME_BYTES
from naiad.sequence import FinishReason

Served = tuple[EngineClient, Recorder]


@pytest.fixture
def other(served: Served, socket_dir: Path) -> Iterator[RawClient]:
    """A second client that has received its `Ready`."""
    other = RawClient(socket_dir / "llm.engine")
    assert isinstance(other.receive(), Ready)
    yield other
    other.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def tokens_until_finished(other: RawClient, sequence_id: int) -> list[int]:
    token_ids: list[int] = []
    while True:
        message = other.receive()
        assert isinstance(message, StepDone)
        for output in message.outputs:
            assert output.sequence_id == sequence_id
            token_ids += output.token_ids
            if output.finish_reason is not None:
                return token_ids


def test_socket_is_for_its_user_alone(served: Served, socket_dir: Path) -> None:
    assert stat.S_IMODE((socket_dir / "llm.engine").stat().st_mode) == 0o600


def test_clients_may_use_the_same_sequence_ids(served: Served, other: RawClient) -> None:
    client, recorder = served
    client.submit([make_request(1, first_id=10)])
    other.send(AddRequests([make_request(1, first_id=20)]))
    recorder.wait_finished(1)
    assert tokens_until_finished(other, 1) == [20, 21, 22]
    assert recorder.token_ids(1) == [10, 11, 12]


def test_abort_reaches_only_the_clients_own_sequence(
    served: Served, other: RawClient, socket_dir: Path
) -> None:
    client, recorder = served
    client.submit([make_request(1, HELD_ID)])
    recorder.wait_started(1)
    other.send(AddRequests([make_request(1, SLOW_ID, max_tokens=10**6)]))
    other.send(Abort([1]))
    tokens_until_finished(other, 1)
    let_go(socket_dir)
    recorder.wait_finished(1)
    assert recorder.reason(1) is FinishReason.LENGTH


def test_closed_client_takes_its_sequences_along(served: Served, other: RawClient) -> None:
    _, recorder = served
    other.send(AddRequests([make_request(1, SLOW_ID, max_tokens=10**6)]))
    recorder.wait_for(lambda: bool(recorder.stats) and recorder.stats[-1].num_running == 1)
    other.close()
    recorder.wait_for(lambda: recorder.stats[-1].num_running == 0)


@pytest.mark.parametrize(
    "poison",
    [
        frame(b"\x80\x04\x95cos\nX"),
        frame(b"\xc1"),
        frame(b"\x81\xa4type\x01"),
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["pickle", "not msgpack", "no message", "oversized", "http"],
)
def test_poisoned_frame_drops_the_connection_and_nothing_else(
    served: Served, other: RawClient, poison: bytes
) -> None:
    client, recorder = served
    other.socket.sendall(poison)
    assert other.receive() is None
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    assert recorder.num_losses == 0


def test_live_sequence_id_used_again_drops_the_connection(served: Served, other: RawClient) -> None:
    client, recorder = served
    other.send(AddRequests([make_request(1, SLOW_ID, max_tokens=10**6)] * 2))
    while other.receive() is not None:
        pass
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    recorder.wait_for(lambda: recorder.stats[-1].num_running == 0)


def test_only_the_owner_may_end_the_engine(served: Served, other: RawClient) -> None:
    client, recorder = served
    other.send(Drain())
    other.send(AddRequests([make_request(1, first_id=4)]))
    assert tokens_until_finished(other, 1) == [4, 5, 6]
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    assert recorder.reason(1) is FinishReason.LENGTH


def test_draining_engine_refuses_new_sequences(served: Served, socket_dir: Path) -> None:
    client, recorder = served
    client.submit([make_request(1, HELD_ID)])
    recorder.wait_started(1)
    client._child.send(encode_frame(Drain()))  # type: ignore[union-attr]
    client._child.send(encode_frame(AddRequests([make_request(2, first_id=4)])))  # type: ignore[union-attr]
    recorder.wait_finished(2)
    assert recorder.outputs[2][-1].error_status == "UNAVAILABLE"
    let_go(socket_dir)
    recorder.wait_finished(1)
    assert recorder.reason(1) is FinishReason.LENGTH


def test_a_refusal_says_nothing_of_the_engine(other: RawClient) -> None:
    """A refusal overtakes messages of the engine's thread, so statistics in it could replace newer ones."""
    other.send(StopServing(600.0))
    assert other.receive() == Busy(False)
    other.send(AddRequests([make_request(1, first_id=4)]))
    message = other.receive()
    assert isinstance(message, StepDone)
    assert [output.error_status for output in message.outputs] == ["UNAVAILABLE"]
    assert message.stats is None


def test_who_says_that_the_server_stops_hears_of_work_even_within_a_step(
    served: Served, other: RawClient, socket_dir: Path
) -> None:
    client, recorder = served
    client.submit([make_request(1, LONG_ID)])
    wait_until(lambda: is_in_long_step(socket_dir))
    other.send(StopServing(600.0))
    assert other.receive() == Busy(True)
    assert not recorder.outputs
    let_go(socket_dir)
    recorder.wait_finished(1)
    assert recorder.reason(1) is FinishReason.LENGTH


def test_client_that_does_not_read_holds_nobody_up(served: Served, other: RawClient) -> None:
    client, recorder = served
    num_tokens = 20_000
    other.send(AddRequests([make_request(i, first_id=0, max_tokens=num_tokens) for i in range(4)]))
    client.submit([make_request(1, first_id=4, max_tokens=num_tokens)])
    recorder.wait_finished(1)
    assert len(recorder.token_ids(1)) == num_tokens


def test_client_that_reads_late_misses_nothing(served: Served, other: RawClient) -> None:
    _, recorder = served
    num_tokens = 20_000
    other.send(AddRequests([make_request(1, first_id=0, max_tokens=num_tokens)]))
    recorder.wait_for(lambda: bool(recorder.stats) and recorder.stats[-1].total_steps == num_tokens)
    assert tokens_until_finished(other, 1) == list(range(num_tokens))


def test_failing_engine_answers_every_client(served: Served, other: RawClient) -> None:
    client, recorder = served
    other.send(AddRequests([make_request(1, SLOW_ID, max_tokens=10**6)]))
    recorder.wait_for(lambda: bool(recorder.stats) and recorder.stats[-1].num_running == 1)
    client.submit([make_request(1, FAILING_ID)])
    messages = iter(other.receive, None)
    outputs = [output for message in messages if isinstance(message, StepDone) for output in message.outputs]
    assert (outputs[-1].finish_reason, outputs[-1].error_message) == (FinishReason.ERROR, "the engine failed")


class FailingSocket(socket.socket):
    """A socket whose sends fail with the errors that are left."""

    errors: list[int]

    def send(self, *args: Any) -> int:
        if self.errors:
            raise OSError(self.errors.pop(0), "refused")
        return super().send(*args)


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[Connection, socket.socket]]]:
    """Make a connection whose sends fail with the given errors at first, and its client's socket."""
    opened: list[socket.socket] = []

    def make(*errors: int) -> tuple[Connection, socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.settimeout(WAIT_S)
        failing = FailingSocket(fileno=ours.detach())
        failing.errors = list(errors)
        opened.extend((failing, theirs))
        return Connection(failing, is_owner=False), theirs

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_what_the_kernel_has_no_memory_for_is_kept(
    connect: Callable[..., tuple[Connection, socket.socket]], number: int
) -> None:
    connection, client = connect(number, number)
    assert not connection.push(b"one ")
    assert not connection.push(b"two ")
    assert connection.push(b"three")
    assert client.recv(100) == b"one two three"


def test_a_client_that_misses_a_frame_sees_the_end(
    connect: Callable[..., tuple[Connection, socket.socket]],
) -> None:
    connection, client = connect(errno.EIO)
    assert connection.push(b"lost")
    assert client.recv(100) == b""


def test_nothing_is_lost_while_the_kernel_has_little_memory(make_client: Callable[[str], Served]) -> None:
    client, recorder = make_client("little-memory")
    client.start()
    client.submit([make_request(1, first_id=4, max_tokens=20)])
    recorder.wait_finished(1)
    assert recorder.token_ids(1) == list(range(4, 24))
    assert recorder.num_losses == 0


def test_a_client_that_can_not_be_watched_is_closed_and_nothing_else(
    make_client: Callable[[str], Served], socket_dir: Path
) -> None:
    client, recorder = make_client("few-watches")
    client.start()
    refused, served = RawClient(socket_dir / "llm.engine"), RawClient(socket_dir / "llm.engine")
    assert refused.receive() is None
    assert isinstance(served.receive(), Ready)
    client.submit([make_request(1, first_id=4)])
    recorder.wait_finished(1)
    assert recorder.num_losses == 0
    for each in (refused, served):
        each.close()
