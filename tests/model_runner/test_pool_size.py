from __future__ import annotations

import pytest

from naiad.errors import ConfigError
from naiad.model_runner import pool_size
from naiad.model_runner.pool_size import bytes_left, default_cpu_bytes, measured_bytes

GIB = 1 << 30


class FakeMemory:
    """10 GiB, of which a rehearsal takes 1 GiB permanently and 1 GiB until `give_back`."""

    def __init__(self, used_bytes: int) -> None:
        self.used = used_bytes
        self.kept = 0

    def total_bytes(self) -> int:
        return 10 * GIB

    def used_bytes(self) -> int:
        return self.used + self.kept

    def give_back(self) -> None:
        self.kept = 0

    def rehearse(self) -> None:
        self.used += GIB
        self.kept += GIB


def test_the_cache_gets_what_the_fraction_and_the_largest_step_leave() -> None:
    memory = FakeMemory(3 * GIB)
    assert measured_bytes(memory, 0.9, memory.rehearse) == 4 * GIB
    assert memory.used_bytes() == 4 * GIB


@pytest.mark.parametrize("used_bytes", [9 * GIB, 10 * GIB])
def test_a_full_gpu_is_refused_with_what_is_in_use(used_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"^kv_cache_memory_fraction = 0.9: .*{used_bytes / GIB / 10:.3f}"):
        bytes_left(0.9, 10 * GIB, used_bytes)


def test_all_of_the_memory_may_be_asked_for() -> None:
    assert bytes_left(1.0, 10 * GIB, 3 * GIB) == 7 * GIB


@pytest.mark.parametrize(
    ("available", "reserved", "expected"),
    [(4 * GIB, 0, GIB), (100 * GIB, 0, 2 * GIB), (5 * GIB, GIB, GIB), (GIB, 2 * GIB, 0)],
)
def test_on_a_cpu_a_quarter_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch, available: int, reserved: int, expected: int
) -> None:
    monkeypatch.setattr(pool_size, "available_memory_bytes", lambda: available)
    assert default_cpu_bytes(reserved) == expected
