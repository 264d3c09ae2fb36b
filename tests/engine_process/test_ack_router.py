"""Acknowledgements where an `llm` model has several instances, as during a reload."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from naiad.engine_process import Ack, AckReceiver, AckRouter, Instance, claim_instance, runtime_path
from naiad.errors import StartupError

# The random part of an id.
SHIFT = 52
OLD, NEW = 7, 8


def receiver(directory: Path, number: int) -> AckReceiver:
    return AckReceiver(Instance(directory, "llm", number).ack_socket)


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return runtime_path(os.getpid())


def claim(model: str = "llm") -> Instance:
    return claim_instance(os.getpid(), model)


def received(receiver: AckReceiver) -> list[Ack]:
    """What has come, the connection's own first read included."""
    return receiver.receive(1.0)


def test_ids_name_their_instance_and_fit_in_62_bits() -> None:
    instance = Instance(Path(), "llm", 1023)
    for num_sequences in (1, 128):
        first = instance.draw_first_id(num_sequences)
        assert {(first + i) >> SHIFT for i in range(num_sequences)} == {1023}
        assert 0 < first + num_sequences < 1 << 62
    assert instance.draw_first_id(1) != instance.draw_first_id(1)


def test_a_number_is_taken_once_and_again_when_it_is_given_back(runtime_dir: Path) -> None:
    first, second = claim(), claim()
    assert [first.number, second.number, claim("other_llm").number] == [0, 1, 0]
    assert first.engine_socket != second.engine_socket
    first.release()
    assert claim().number == 0
    assert runtime_dir.is_dir()


def test_the_last_instance_takes_the_directory_away(runtime_dir: Path) -> None:
    instance = claim()
    assert runtime_dir.is_dir()
    instance.release()
    assert not runtime_dir.exists()
    assert claim().number == 0


def test_numbers_end(runtime_dir: Path) -> None:
    claim()
    for number in range(1024):
        (runtime_dir / f"llm.{number}.claim").touch()
    with pytest.raises(StartupError, match="restart the server"):
        claim()


def test_each_instance_gets_its_own(socket_dir: Path) -> None:
    old, new = receiver(socket_dir, OLD), receiver(socket_dir, NEW)
    router = AckRouter(socket_dir, "llm")
    router.send(OLD << SHIFT | 5, 1, False)
    router.send(NEW << SHIFT | 5, 2, True)
    assert received(old) == [Ack(OLD << SHIFT | 5, 1, False)]
    assert received(new) == [Ack(NEW << SHIFT | 5, 2, True)]
    for each in (router, old, new):
        each.close()


def test_the_end_of_the_old_instance_leaves_the_new_one_reachable(socket_dir: Path) -> None:
    old, new = receiver(socket_dir, OLD), receiver(socket_dir, NEW)
    router = AckRouter(socket_dir, "llm")
    router.send(OLD << SHIFT, 1, False)
    old.close()
    router.send(OLD << SHIFT, 1, False)
    router.send(NEW << SHIFT, 1, False)
    assert received(new) == [Ack(NEW << SHIFT, 1, False)]
    router.close()
    new.close()


def test_ids_of_nobody_leave_nothing_behind(socket_dir: Path) -> None:
    new = receiver(socket_dir, NEW)
    router = AckRouter(socket_dir, "llm")
    num_files = len(os.listdir("/proc/self/fd"))
    for instance in range(100, 150):
        router.send(instance << SHIFT, 1, False)
    assert len(os.listdir("/proc/self/fd")) == num_files
    router.send(NEW << SHIFT, 1, False)
    assert received(new) == [Ack(NEW << SHIFT, 1, False)]
    router.close()
    new.close()
