"""How much memory may still be allocated, on a machine and in a container."""

from __future__ import annotations

from pathlib import Path

from naiad.config.memory import available_memory_bytes


def test_available_memory_is_the_containers_rest_when_that_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 600000


def test_a_container_without_limit_does_not_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:    4000 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 4000 * 1024


def test_files_that_a_container_has_read_make_room(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:    4000 kB\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    stat = "anon 100000\nfile 800000\ninactive_file 700000\nactive_file 100000\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert available_memory_bytes(meminfo, tmp_path) == 800000
