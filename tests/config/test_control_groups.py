"""What a container's control groups, of either version, leave of memory and cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from naiad.config.control_groups import ControlGroups

NOBODY = Path("/nowhere")
MEMORY = 4_000_000
UNLIMITED_V1 = "9223372036854771712\n"


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def member(tmp_path: Path, text: str) -> ControlGroups:
    own = tmp_path / "own"
    own.write_text(text)
    return ControlGroups(tmp_path, own)


def test_without_groups_nothing_is_limited(tmp_path: Path) -> None:
    for groups in (ControlGroups(tmp_path, NOBODY), ControlGroups(NOBODY, NOBODY), member(tmp_path, "?\n")):
        assert groups.memory_left(MEMORY) == MEMORY
        assert groups.num_cores(8) == 8


@pytest.mark.parametrize(
    ("place", "files"),
    [
        (".", {"memory.max": "1000000\n", "memory.current": "400000\n"}),
        ("memory", {"memory.limit_in_bytes": "1000000\n", "memory.usage_in_bytes": "400000\n"}),
    ],
)
def test_a_containers_limit_leaves_what_is_not_used(
    tmp_path: Path, place: str, files: dict[str, str]
) -> None:
    write(tmp_path / place, files)
    assert ControlGroups(tmp_path, NOBODY).memory_left(MEMORY) == 600_000
    assert ControlGroups(tmp_path, NOBODY).memory_left(500_000) == 500_000


@pytest.mark.parametrize(
    ("place", "files"),
    [
        (".", {"memory.max": "max\n", "memory.current": "400000\n"}),
        ("memory", {"memory.limit_in_bytes": UNLIMITED_V1, "memory.usage_in_bytes": "400000\n"}),
    ],
)
def test_a_group_without_limit_does_not_limit(tmp_path: Path, place: str, files: dict[str, str]) -> None:
    write(tmp_path / place, files)
    assert ControlGroups(tmp_path, NOBODY).memory_left(MEMORY) == MEMORY


@pytest.mark.parametrize(
    ("place", "files"),
    [
        (
            ".",
            {
                "memory.max": "1000000\n",
                "memory.current": "900000\n",
                "memory.stat": "anon 100000\nfile 800000\ninactive_file 700000\nactive_file 100000\n",
            },
        ),
        (
            # A group of version 1 counts those inside it in the figures that begin with total.
            "memory",
            {
                "memory.limit_in_bytes": "1000000\n",
                "memory.usage_in_bytes": "900000\n",
                "memory.stat": "inactive_file 5\nactive_file 5\n"
                "total_inactive_file 700000\ntotal_active_file 100000\n",
            },
        ),
    ],
)
def test_files_that_a_container_has_read_make_room(tmp_path: Path, place: str, files: dict[str, str]) -> None:
    write(tmp_path / place, files)
    assert ControlGroups(tmp_path, NOBODY).memory_left(MEMORY) == 900_000


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    groups = member(tmp_path, "1:name=systemd:/elsewhere\n0::/system.slice/naiad.service\n")
    service = tmp_path / "system.slice" / "naiad.service"
    outer, inner = ({"memory.max": limit, "memory.current": "500000\n"} for limit in ("2000000", "1500000"))
    write(service.parent, outer | {"cpu.max": "300000 100000\n"})
    write(service, inner | {"cpu.max": "max 100000\n"})
    assert groups.memory_left(MEMORY) == 1_000_000
    assert groups.num_cores(8) == 3
    write(service, {"memory.max": "max", "cpu.max": "150000 100000\n"})
    assert groups.memory_left(MEMORY) == 1_500_000
    assert groups.num_cores(8) == 1


def test_version_one_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    groups = member(tmp_path, "9:memory:/docker/a:b\n4:cpu,cpuacct:/docker/c\n1:name=systemd:/docker/d\n")
    write(
        tmp_path / "memory" / "docker" / "a:b",
        {"memory.limit_in_bytes": "900000\n", "memory.usage_in_bytes": "200000\n"},
    )
    write(
        tmp_path / "cpu" / "docker" / "c", {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"}
    )
    assert groups.memory_left(MEMORY) == 700_000
    assert groups.num_cores(8) == 2


@pytest.mark.parametrize(
    ("place", "files", "num_cores"),
    [
        (".", {"cpu.max": "max 100000\n"}, 8),
        (".", {"cpu.max": "50000 100000\n"}, 1),
        (".", {"cpu.max": "350000 100000\n"}, 3),
        (".", {"cpu.max": "damaged"}, 8),
        ("cpu", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 8),
        ("cpu", {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 1),
        ("cpu", {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_quota_leaves_whole_cores(
    tmp_path: Path, place: str, files: dict[str, str], num_cores: int
) -> None:
    write(tmp_path / place, files)
    assert ControlGroups(tmp_path, NOBODY).num_cores(8) == num_cores
