"""The server's regions in /dev/shm, which processes that were killed leave behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_SHM = "/dev/shm/"
REGION_PREFIX = "triton_python_backend_shm_region_"


def process_group(group_id: int, proc: Path = Path("/proc")) -> list[int]:
    """The ids of the process group's live processes."""
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        # The name in parentheses may hold any bytes; after it come state, parent and group.
        with contextlib.suppress(OSError):
            state, _, group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) == group_id and state not in b"ZX":
                found.append(int(entry.name))
    return found


def mapped_regions(pids: list[int], proc: Path = Path("/proc")) -> set[str]:
    """Names of the Python backend's regions that these processes have mapped.

    Regions with other names belong to clients that registered them with the server.
    """
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (proc / str(pid) / "maps").read_text(errors="replace").splitlines():
                _, separator, name = line.partition(_SHM + REGION_PREFIX)
                if separator:
                    names.add(REGION_PREFIX + name.removesuffix(" (deleted)"))
    return names


def last_change_s(directory: Path = Path(_SHM)) -> float:
    """When an entry was last added to or removed from the directory, in seconds since the epoch."""
    return directory.stat().st_mtime


def remove_regions(names: set[str], directory: Path = Path(_SHM)) -> None:
    """Remove the regions that still exist."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / name)


def remove_regions_with_prefix(prefix: str, directory: Path = Path(_SHM)) -> None:
    """Remove the regions whose names begin so."""
    remove_regions({path.name for path in directory.glob(f"{prefix}*")}, directory)
