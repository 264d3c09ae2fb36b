"""How much memory may still be allocated, on a machine and in a container."""

from __future__ import annotations

from pathlib import Path

from naiad.config.memory import available_memory_bytes

NOWHERE = Path("/nowhere")


def test_available_memory_is_the_containers_rest_when_that_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory_bytes(meminfo, tmp_path, NOWHERE) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory_bytes(meminfo, tmp_path, NOWHERE) == 600000


def test_a_container_without_limit_does_not_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:    4000 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory_bytes(meminfo, tmp_path, NOWHERE) == 4000 * 1024


def test_files_that_a_container_has_read_make_room(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:    4000 kB\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    stat = "anon 100000\nfile 800000\ninactive_file 700000\nactive_file 100000\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert available_memory_bytes(meminfo, tmp_path, NOWHERE) == 900000


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemAvailable:    4000 kB\n")
    own.write_text("1:name=systemd:/elsewhere\n0::/system.slice/naiad.service\n")
    service = tmp_path / "system.slice" / "naiad.service"
    service.mkdir(parents=True)
    for group, limit in ((tmp_path / "system.slice", "2000000"), (service, "1500000")):
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text("500000\n")
    assert available_memory_bytes(meminfo, tmp_path, own) == 1000000
    (service / "memory.max").write_text("max")
    assert available_memory_bytes(meminfo, tmp_path, own) == 1500000
