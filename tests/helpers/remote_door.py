"""A running `naiad openai`, in front of a server of a test."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from helpers.server import Server, eventually

_READY = re.compile(r"ready: openai=(\S+) in front of")


@contextlib.contextmanager
def running_door(grpc: str, checkpoint: Path, *options: str) -> Iterator[Server]:
    """Start it and wait for its ready line; at the end it must stop with exit code 0."""
    command = [sys.executable, "-m", "naiad.cli.main", "openai", "--url", grpc]
    command += ["--tokenizer", str(checkpoint), "--port", "0", "--exit-timeout-s", "5", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    door = Server(process)
    threading.Thread(target=_read, args=(door,), daemon=True).start()
    try:
        eventually(lambda: bool(door.openai) or process.poll() is not None, 120)
        assert door.openai, "\n".join(door.lines)
        yield door
    finally:
        door.ask_to_stop()
        process.wait(60)
    assert process.returncode == 0, "\n".join(door.lines)


def _read(door: Server) -> None:
    assert door.process.stdout is not None
    for line in door.process.stdout:
        door.lines.append(line.rstrip())
        if match := _READY.search(line):
            door.openai = match.group(1)
