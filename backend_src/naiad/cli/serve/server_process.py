"""One run of the server, seen from the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import psutil

from naiad.cli.serve.listeners import listens
from naiad.cli.serve.runtime_folder import region_prefix
from naiad.cli.serve.server_files import STUB_NAME
from naiad.cli.serve.server_guard import ORDER_KILL, ORDER_TERMINATE
from naiad.cli.serve.server_log import ServerLog
from naiad.cli.serve.shared_memory import remove_regions_with_prefix
from naiad.cli.serve.start_watch import StartSight
from naiad.engine_process.runtime_dir import runtime_path

# The kernel shows that many characters of a process's name.
_SHOWN_STUB_NAME = STUB_NAME[:15]
# What the Python backend starts a stub with.
_SHELLS = ("bash", "sh")


class ServerProcess:
    """The server under its guard, which cleans up after it even if this process is killed."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], runtime_dir: Path, log: ServerLog
    ) -> None:
        """Start it.

        Args:
            command: tritonserver with its arguments.
            environment: the server's environment variables.
            runtime_dir: directory that the guard removes if this process is killed.
            log: takes the output of the server and its children.
        """
        # Of an earlier run whose guard was killed.
        remove_regions_with_prefix(region_prefix(runtime_dir))
        guard = [sys.executable, "-m", "naiad.cli.serve.server_guard", "--remove", str(runtime_dir), "--"]
        self._guard = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            # Only the supervisor should get the terminal's Ctrl-C.
            start_new_session=True,
        )
        self._log = log
        self._reader = threading.Thread(target=self._read, args=(log,), name="server-log", daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The server's exit code once it and all its processes are gone."""
        code = self._guard.poll()
        if code is not None:
            self._reader.join(timeout=1)
        return code

    def terminate(self) -> None:
        """Ask it to drain and exit."""
        self._order(ORDER_TERMINATE)

    def kill(self, timeout_s: float) -> None:
        """Kill it with all its processes, and wait until its files are removed."""
        self._order(ORDER_KILL)
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self.poll()

    def num_stubs(self) -> int:
        """Number of live stubs: there is one for each Python model."""
        parents: dict[int, int] = {}
        for process in self._descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                if _model_of(process) is not None:
                    parents[process.pid] = process.ppid()
        # A stub's child looks like the stub between fork and exec.
        return sum(parent not in parents for parent in parents.values())

    def listens_on(self, port: int) -> bool:
        """Whether it, and not another program, listens on the port."""
        return listens(self._guard.pid, port)

    def start_sight(self) -> StartSight:
        """What is seen of the server while it starts."""
        stubs: dict[int, str] = {}
        dead: dict[int, str] = {}
        parents: dict[int, int] = {}
        cpu_s, read_bytes = 0.0, 0
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                name, is_dead = process.name(), process.status() == psutil.STATUS_ZOMBIE
                parents[process.pid] = process.ppid()
                if is_dead and name in (_SHOWN_STUB_NAME, *_SHELLS):
                    dead[process.pid] = _ending(process.pid)
                elif (model := _model_of(process)) is not None:
                    stubs[process.pid] = model
                # The server itself is busy with our questions.
                if not is_dead and process.ppid() != self._guard.pid:
                    times = process.cpu_times()
                    cpu_s += times.user + times.system
                    read_bytes += process.io_counters().read_bytes
        # A stub's child looks like the stub between fork and exec.
        forked = {pid for pid, parent in parents.items() if parent in stubs}
        stubs, dead = _without(stubs, forked), _without(dead, forked)
        return StartSight(stubs, dead, self._log.num_lines, cpu_s, read_bytes)

    def runtime_directories(self) -> list[Path]:
        """The directories of its models' sockets: one directory, once the models have been loaded."""
        # Any descendant: the program may be a script that starts the server.
        paths = [runtime_path(process.pid) for process in self._descendants()]
        return [path for path in paths if path.is_dir()]

    def _descendants(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self._guard.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def _order(self, order: bytes) -> None:
        assert self._guard.stdin is not None
        # The guard may have exited; then it needs no orders.
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(order)
            self._guard.stdin.flush()

    def _read(self, log: ServerLog) -> None:
        assert self._guard.stdout is not None
        for line in self._guard.stdout:
            # The server would stand still if nobody read its lines.
            with contextlib.suppress(Exception):
                log.take(line.decode(errors="replace").rstrip("\n"))


def _without(processes: Mapping[int, str], pids: AbstractSet[int]) -> dict[int, str]:
    return {pid: text for pid, text in processes.items() if pid not in pids}


def _model_of(process: psutil.Process) -> str | None:
    """The model that a live process is the stub of, or None.

    A stub's first argument is MODEL/VERSION/model.py. The Python backend runs each stub without arguments
    first, to see whether it may be executed; that run ends at once and serves no model.
    """
    words = process.cmdline()
    is_stub = len(words) > 1 and Path(words[0]).name == STUB_NAME
    return Path(words[1]).parent.parent.name if is_stub else None


def _ending(pid: int) -> str:
    """How a process ended that its parent has not asked for yet, in words; empty: it cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        # The last field of proc(5)'s stat is the status that waitpid() returns.
        status = int(Path(f"/proc/{pid}/stat").read_bytes().split()[-1])
        if os.WIFSIGNALED(status):
            return f" by signal {signal.Signals(os.WTERMSIG(status)).name}"
        return f" with exit status {os.WEXITSTATUS(status)}"
    return ""
