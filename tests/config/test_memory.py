"""How much memory may still be allocated, on a machine and in a container."""

from __future__ import annotations

from pathlib import Path

from naiad.config.control_groups import ControlGroups
from naiad.config.memory import available_memory_bytes


def test_available_memory_is_the_containers_rest_when_that_is_less(tmp_path: Path) -> None:
    meminfo, groups = tmp_path / "meminfo", ControlGroups(tmp_path, Path("/nowhere"))
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory_bytes(meminfo, groups) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory_bytes(meminfo, groups) == 600_000
