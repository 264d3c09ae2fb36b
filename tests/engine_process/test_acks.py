from __future__ import annotations

import os
import resource
import select
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from naiad.engine_process import Ack, AckReceiver, AckSender
from naiad.engine_process import acks as acks_module
from naiad.errors import StartupError


@pytest.fixture
def path(socket_dir: Path) -> Path:
    return socket_dir / "llm.acks"


@pytest.fixture
def receiver(path: Path) -> Iterator[AckReceiver]:
    receiver = AckReceiver(path)
    yield receiver
    receiver.close()


@pytest.fixture
def sender(path: Path) -> Iterator[AckSender]:
    sender = AckSender(path)
    yield sender
    sender.close()


def test_acks_arrive_in_order(receiver: AckReceiver, sender: AckSender) -> None:
    sent = [Ack(2**64 - 1, 1, False), Ack(0, 0, True), Ack(7, 2**32 - 1, False)]
    for ack in sent:
        sender.send(*ack)
    assert receiver.receive() == sent


def test_nothing_sent_is_nothing_received(receiver: AckReceiver) -> None:
    assert receiver.receive() == []


def test_receiver_can_be_waited_for(receiver: AckReceiver, sender: AckSender) -> None:
    poll = select.poll()
    poll.register(receiver.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    sender.send(1, 1, False)
    assert poll.poll(1000) != []
    receiver.receive()
    assert poll.poll(0) == []


def test_several_senders_reach_one_receiver(receiver: AckReceiver, path: Path) -> None:
    senders = [AckSender(path) for _ in range(3)]
    for number, sender in enumerate(senders):
        sender.send(number, 1, False)
    acks = receiver.receive()
    for sender in senders:
        sender.close()
    assert sorted(ack.sequence_id for ack in acks) == [0, 1, 2]


def test_sender_without_receiver_forgets(path: Path, sender: AckSender) -> None:
    sender.send(1, 1, False)
    receiver = AckReceiver(path)
    sender.send(2, 1, False)
    acks = receiver.receive()
    receiver.close()
    assert acks == [Ack(2, 1, False)]


def test_sender_finds_a_receiver_that_came_back(path: Path, sender: AckSender) -> None:
    first = AckReceiver(path)
    sender.send(1, 1, False)
    first.close()
    second = AckReceiver(path)
    sender.send(2, 1, False)
    acks = second.receive()
    second.close()
    assert acks == [Ack(2, 1, False)]


def test_no_chunk_is_lost_when_the_receiver_is_late(receiver: AckReceiver, sender: AckSender) -> None:
    num_acks = 20_000
    for number in range(num_acks):
        sender.send(number % 4, 1, number == 3)
    acks = receiver.receive()
    assert len(acks) < num_acks, "the socket never got full: the test proves nothing"
    for sequence_id in range(4):
        sender.send(sequence_id, 0, False)
    acks += receiver.receive()
    assert [sum(ack.num_chunks for ack in acks if ack.sequence_id == i) for i in range(4)] == [
        num_acks // 4
    ] * 4


def test_cancellation_survives_a_full_socket(receiver: AckReceiver, sender: AckSender) -> None:
    for _ in range(20_000):
        sender.send(1, 1, False)
    sender.send(2, 1, True)
    sender.send(2, 1, False)
    receiver.receive()
    sender.send(1, 1, False)
    assert Ack(2, 2, True) in receiver.receive()


def test_a_reader_without_room_for_a_sender_pauses(
    receiver: AckReceiver, sender: AckSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(acks_module, "time", SimpleNamespace(sleep=pauses.append))
    sender.send(1, 1, False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert receiver.receive(0.5) == receiver.receive() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # Who does not wait does not spin.
    assert pauses == [0.05, 0.0]
    assert receiver.receive(0.5) == [Ack(1, 1, False)]
    assert len(pauses) == 2


def test_packet_of_another_size_is_dropped(receiver: AckReceiver, sender: AckSender, path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        stranger.send(b"x" * 12)
        stranger.send(b"x" * 14)
        assert receiver.receive() == []
    sender.send(1, 1, False)
    assert receiver.receive() == [Ack(1, 1, False)]


def test_receivers_socket_is_for_its_user_alone(receiver: AckReceiver, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_closed_receiver_leaves_no_file_and_no_descriptor(path: Path, sender: AckSender) -> None:
    before = set(os.listdir("/proc/self/fd"))
    receiver = AckReceiver(path)
    sender.send(1, 1, False)
    receiver.receive()
    receiver.close()
    sender.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not path.exists()


def test_too_long_path_is_an_error(socket_dir: Path) -> None:
    with pytest.raises(StartupError, match="too long for a Unix socket"):
        AckReceiver(socket_dir / ("x" * 120))
