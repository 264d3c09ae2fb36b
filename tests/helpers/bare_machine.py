"""Runs a command as on a bare machine: no rights, nothing to write to but a small /tmp and /dev/shm.

`unshare -m python bare_machine.py OPTIONS -- COMMAND`, as root: the mounts are seen by the command only.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

_NOBODY = 65534
_NEVER_WRITTEN = ("/proc", "/sys", "/dev", "/tmp")


def main() -> None:
    """Prepare the mounts, give up all rights, and become the command."""
    args = _parse()
    needed = [Path(sys.base_prefix), *args.shown]
    stage = Path(tempfile.mkdtemp(dir="/run"))
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", stage)
    for number, path in enumerate(needed):
        (stage / str(number)).mkdir()
        _mount("--rbind", path, stage / str(number))
    for place in {_hidden(path) for path in needed} - {None}:
        _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", place)
    _mount("-t", "tmpfs", "-o", f"size={args.tmp_bytes},mode=1777", "tmpfs", "/tmp")
    _mount("-t", "tmpfs", "-o", f"size={args.shm_bytes},mode=1777", "tmpfs", "/dev/shm")
    for number, path in enumerate(needed):
        path.mkdir(parents=True, exist_ok=True)
        _mount("--rbind", stage / str(number), path)
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        place = line.split()[1]
        if not place.startswith(_NEVER_WRITTEN) or Path(place) in needed:
            _mount("-o", "remount,bind,ro", place)
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.descriptors, args.descriptors))
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    os.environ.pop("TMPDIR", None)
    os.environ["HOME"] = "/nonexistent"
    os.chdir("/")
    os.execvp(args.command[0], args.command)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shown", type=Path, action="append", default=[], help="a directory that can be read")
    add("--tmp-bytes", type=int, required=True)
    add("--shm-bytes", type=int, required=True)
    add("--descriptors", type=int, required=True)
    add("command", nargs="+")
    return parser.parse_args()


def _hidden(path: Path) -> Path | None:
    """The highest directory on the way that others may not enter."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 1), None)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    main()
