from __future__ import annotations

import os
from pathlib import Path

from naiad.cli.serve.shared_memory import last_change_s, mapped_regions, process_group, remove_regions

REGION = "triton_python_backend_shm_region_0b0e"


def test_only_the_backends_own_regions_are_found(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").write_text(
        f"7f00-7f01 rw-s 0 00:1a 5 /dev/shm/{REGION}\n"
        "7f01-7f02 rw-s 0 00:1a 6 /dev/shm/a_clients_region\n"
        "7f02-7f03 r-xp 0 08:01 7 /usr/lib/libc.so.6\n"
        f"7f03-7f04 rw-s 0 00:1a 8 /dev/shm/{REGION}2 (deleted)\n"
    )
    assert mapped_regions([7, 8], tmp_path) == {REGION, REGION + "2"}


def test_regions_are_removed_and_others_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    remove_regions({"a", "gone"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_group_is_its_live_members(tmp_path: Path) -> None:
    for pid, stat in {
        "10": "10 (odd) name) S 1 50 50 0",
        "11": "11 (dead) Z 1 50 50 0",
        "12": "12 (other) S 1 60 60 0",
    }.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(stat)
    assert process_group(50, tmp_path) == [10]


def test_names_of_processes_may_be_cut_within_a_character(tmp_path: Path) -> None:
    for pid, name in {"10": "naïf".encode()[:3], "11": b"\xff\xfe"}.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_bytes(b"%s (%s) S 1 50 50 0" % (pid.encode(), name))
    assert sorted(process_group(50, tmp_path)) == [10, 11]


def test_this_process_is_in_its_group() -> None:
    assert os.getpid() in process_group(os.getpgrp())


def test_a_region_that_comes_changes_the_directory(tmp_path: Path) -> None:
    os.utime(tmp_path, (1, 1))
    before_s = last_change_s(tmp_path)
    (tmp_path / REGION).touch()
    assert last_change_s(tmp_path) > before_s
