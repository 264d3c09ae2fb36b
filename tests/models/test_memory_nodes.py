"""Memory nodes: which a process computes at, and memory that comes from several."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
from pathlib import Path

import pytest

from helpers.numa_maps import REASON, policy_at, tells_of_nodes
from naiad.models import memory_nodes
from naiad.models.memory_nodes import MemoryNodes, interleave, nodes_of

NODES = {"0": "0-3,8-11", "1": "4-7,12-15", "2": "", "3": "16-19"}


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Two nodes of eight CPUs each, one without CPUs, and one without memory."""
    (tmp_path / "has_memory").write_text("0-2\n")
    for number, cpus in NODES.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("cpus", "expected"), [({1, 2}, [0]), ({12}, [1]), (range(20), [0, 1]), ({17}, []), ({40}, [])]
)
def test_nodes_of_cpus(nodes: Path, cpus: set[int], expected: list[int]) -> None:
    assert nodes_of(cpus, nodes) == expected


def test_a_system_without_nodes(tmp_path: Path) -> None:
    assert nodes_of({0}, tmp_path / "nothing") == []


@pytest.mark.skipif(not tells_of_nodes(), reason=REASON)
@pytest.mark.parametrize("numbers", [[0], [0, 1]])
def test_the_system_takes_pages_from_these_nodes(numbers: list[int]) -> None:
    """A machine may have one node: then the others are left out."""
    memory = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    interleave(address, 1 << 20, numbers)
    assert policy_at(address) == "interleave"
    assert policy_at(address + 4096) == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="memory nodes are chosen on x86-64 only")
def test_a_refusal_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = MemoryNodes([0, 1])
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            nodes.spread(4097, 1)
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "weights are not spread over the memory nodes [0, 1]"
    ]


@pytest.mark.parametrize(("found", "calls"), [([], 0), ([0], 0), ([0, 2], 1)])
def test_memory_is_spread_over_several_nodes_only(
    monkeypatch: pytest.MonkeyPatch, found: list[int], calls: int
) -> None:
    made: list[object] = []
    monkeypatch.setattr(memory_nodes, "nodes_of", lambda cpus: found)
    monkeypatch.setattr(memory_nodes, "interleave", lambda *arguments: made.append(arguments))
    MemoryNodes.of_process().spread(1 << 21, 5)
    assert made == [(1 << 21, 5, found)] * calls
