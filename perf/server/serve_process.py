"""Runs `naiad serve` as a user would, on free ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

_READY = re.compile(r"ready: http=(\S+) grpc=(\S+) metrics=(\S+) openai=http://([^/\s]+)/v1")
_STOP_TIMEOUT_S = 60
_NUM_LAST_LINES = 100


@dataclass(frozen=True, slots=True)
class Served:
    """HOST:PORT of a server's endpoints, the process id of `naiad serve`, and its last lines as they come."""

    http: str
    grpc: str
    metrics: str
    openai: str = ""
    pid: int = 0
    last_lines: deque[str] = field(default_factory=deque)


@contextmanager
def naiad_serve(
    options: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[Served]:
    """Start the server, yield its endpoints, and stop it with SIGTERM.

    Args:
        options: options of `naiad serve`, except the ports.
        environment: variables in addition to those of this process.
        log: file for the lines that the server writes once it is ready.

    Raises:
        RuntimeError: it ended before it was ready; the message contains its last lines.
    """
    command = [
        *(sys.executable, "-m", "naiad.cli.main", "serve"),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
        *("--openai-port", "0", *options),
    ]
    if threading.current_thread() is threading.main_thread():
        # A measurement that is ended stops its server.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with log.open("w", encoding="utf-8") if log else nullcontext() as file:
        with _started(command, environment) as process:
            served = _wait_until_ready(process)
            # A full pipe would block the server.
            lines = (process.stdout, served.last_lines, file)
            reader = threading.Thread(target=_read, args=lines, daemon=True)
            reader.start()
            yield served
        reader.join(timeout=5)


@contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | (environment or {}),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _wait_until_ready(process: subprocess.Popen[str]) -> Served:
    last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
    assert process.stdout is not None
    for line in process.stdout:
        last_lines.append(line)
        if match := _READY.search(line):
            http, grpc, metrics, openai = match.groups()
            return Served(http, grpc, metrics, openai, process.pid, last_lines)
    raise RuntimeError("naiad serve ended before it was ready:\n" + "".join(last_lines))


def _read(lines: Iterable[str], last_lines: deque[str], file: TextIO | None) -> None:
    for line in lines:
        last_lines.append(line)
        if file:
            print(line, end="", file=file, flush=True)
