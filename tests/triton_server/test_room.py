"""Responses that do not fit into the server's shared memory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from naiad.errors import UnavailableError
from naiad.triton_server.responses.room import check_room

MIB = 1 << 20


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much of the shared memory is free."""
    free = [0]
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free[0], f_frsize=1))
    return free


def test_small_responses_are_not_measured_against_it(free_bytes: list[int]) -> None:
    check_room({"text_output": np.array([b"a" * 30_000], dtype=object)})
    check_room({})


def test_large_ones_leave_room_for_the_others(free_bytes: list[int]) -> None:
    logits = np.zeros((4, MIB // 4), dtype=np.float32)
    free_bytes[0] = 6 * MIB
    check_room({"context_logits": logits})
    free_bytes[0] -= 1
    with pytest.raises(
        UnavailableError, match=f"a response of {4 * MIB} bytes does not fit .* {6 * MIB - 1} bytes"
    ):
        check_room({"context_logits": logits})


def test_texts_count_with_their_length(free_bytes: list[int]) -> None:
    with pytest.raises(UnavailableError, match="of 200000 bytes"):
        check_room({"text_output": np.array([b"a" * 100_000, b"b" * 100_000], dtype=object)})


def test_the_machines_shared_memory_is_read() -> None:
    check_room({"context_logits": np.zeros(MIB, dtype=np.uint8)}, Path("/"))
