"""The gate's process may open as many descriptors as its connections need."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from helpers.engine_harness import wait_until
from helpers.ports import free_port

SOFT, HARD = 64, 200
PATIENCE_S = 60
GATE = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT}, {HARD}))
runpy.run_module("naiad.gate", run_name="__main__", alter_sys=True)
"""


def accepts(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def gate(max_connections: int) -> Iterator[subprocess.Popen[str]]:
    """A gate that accepts connections, in a process with these limits."""
    http_port = free_port()
    words = ["--host", "127.0.0.1", "--http-port", str(http_port), "--grpc-port", "0", "--metrics-port", "0"]
    words += [f"--server-{name}-port=1" for name in ("http", "grpc", "metrics")]
    words += [f"--max-connections={max_connections}"]
    process = subprocess.Popen([sys.executable, "-c", GATE, *words], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: accepts(http_port) or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> list[str]:
    """What a process has written when it has been told to end."""
    process.send_signal(signal.SIGTERM)
    _, written = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, written
    return written.splitlines()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    with gate(max_connections=8) as process:
        limits = Path(f"/proc/{process.pid}/limits").read_text(encoding="ascii").splitlines()
        (line,) = [each for each in limits if each.startswith("Max open files")]
        assert line.split()[3:5] == [str(HARD), str(HARD)]
        assert ended(process) == []


def test_a_hard_limit_that_is_too_small_is_told() -> None:
    with gate(max_connections=23) as process:
        (line,) = ended(process)
    assert f"the hard limit of file descriptors is {HARD}: expected at least 202 for 23 connections" in line
