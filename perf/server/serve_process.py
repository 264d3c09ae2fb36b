"""`naiad serve` as a user starts it, on free ports."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_READY = re.compile(r"ready: .*\bgrpc=(\S+)")
_STOP_TIMEOUT_S = 60


@contextmanager
def naiad_serve(model_dir: Path, options: Sequence[str]) -> Iterator[str]:
    """Start the server, give HOST:PORT of its gRPC endpoint, stop it with SIGTERM.

    Args:
        model_dir: what it serves.
        options: further options of `naiad serve`.

    Raises:
        RuntimeError: it ended before it was ready; holds its last lines.
    """
    command = [
        *(sys.executable, "-m", "naiad.cli.main", "serve", "--model", str(model_dir)),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *options),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = _wait_until_ready(process)
        # A full pipe would stop the server.
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
        yield url
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    last_lines: deque[str] = deque(maxlen=20)
    assert process.stdout is not None
    for line in process.stdout:
        last_lines.append(line)
        if match := _READY.search(line):
            return match.group(1)
    raise RuntimeError("naiad serve ended before it was ready:\n" + "".join(last_lines))
