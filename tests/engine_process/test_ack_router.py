"""Acknowledgements when an `llm` model has several instances, as during a reload."""

from __future__ import annotations

import os
from pathlib import Path

from naiad.engine_process import Ack, AckReceiver, AckRouter, Instance

# The random part of an id.
SHIFT = 52
OLD, NEW = 7, 8


def receiver(directory: Path, number: int) -> AckReceiver:
    return AckReceiver(Instance(directory, "llm", number).ack_socket)


def received(receiver: AckReceiver) -> list[Ack]:
    """The acknowledgements received within a second."""
    return receiver.receive(1.0)


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
