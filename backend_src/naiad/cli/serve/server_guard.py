"""`python -m naiad.cli.serve.server_guard`: runs a tritonserver that must not outlive `naiad serve`.

The supervisor writes orders to this process's stdin, which is closed when the supervisor ends, however
it ends. When the guard exits, the server's whole process group (its stubs and the engine) is gone, and
so are its regions in /dev/shm and its sockets.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from naiad.cli.serve.shared_memory import last_change_s, mapped_regions, process_group, remove_regions
from naiad.engine_process.runtime_dir import remove_runtime_directory, runtime_directory
from naiad.errors import StartupError

ORDER_TERMINATE = b"t"
ORDER_KILL = b"k"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHECK_S = 0.2
_LOOK_AT_MEMORY_S = 1.0
_MAPPED_AFTER_S = 10.0
_GROUP_END_S = 5.0


class Guard:
    """Starts the server's process group, and removes everything that it leaves behind."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the server in a process group of its own."""
        # This process has one thread, so the parent-death signal follows the process.
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_prepare
        )
        self._regions: set[str] = set()
        self._last_change_s = 0.0
        self._look_until_s = 0.0

    def terminate(self) -> None:
        """Ask the server to drain."""
        self._server.terminate()

    def run(self, orders_fd: int) -> bool:
        """Follow orders until the server has ended or must be killed.

        Returns:
            Whether the supervisor still runs.
        """
        next_look_s = 0.0
        while self._server.poll() is None:
            self._reap_orphans()
            if time.monotonic() >= next_look_s:
                self._look_at_new_memory()
                next_look_s = time.monotonic() + _LOOK_AT_MEMORY_S
            if not select.select([orders_fd], [], [], _CHECK_S)[0]:
                continue
            orders = os.read(orders_fd, 64)
            if not orders:
                return False
            if ORDER_KILL in orders:
                break
            self.terminate()
        return True

    def finish(self) -> int:
        """Kill what is left of the process group, remove its files, and return the server's exit code."""
        self._look_at_memory()
        deadline_s = time.monotonic() + _GROUP_END_S
        while self._has_processes() and time.monotonic() < deadline_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.poll()
            self._reap_orphans()
            time.sleep(0.01)
        remove_regions(self._regions)
        _remove_sockets(self._server.pid)
        code = self._server.poll()
        return 1 if code is None else code if code >= 0 else 128 - code

    def _has_processes(self) -> bool:
        """Whether a process of the group lives, or has ended and waits for this process to reap it."""
        if process_group(self._server.pid):
            return True
        try:
            os.waitid(os.P_PGID, self._server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _reap_orphans(self) -> None:
        """Reap what ended after its parent did, but never the server: its exit code is for `poll`."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid == self._server.pid:
                    return
                os.waitpid(ended.si_pid, 0)

    def _look_at_new_memory(self) -> None:
        """Collect the names of new regions; each is mapped soon after it is created."""
        change_s, now_s = last_change_s(), time.monotonic()
        if change_s != self._last_change_s:
            self._last_change_s, self._look_until_s = change_s, now_s + _MAPPED_AFTER_S
        if now_s <= self._look_until_s:
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        self._regions |= mapped_regions(process_group(self._server.pid))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command after `--`, and follow the orders on stdin."""
    parser = argparse.ArgumentParser(prog="naiad.cli.serve.server_guard", description=__doc__)
    parser.add_argument("--remove", required=True, help="directory to remove if the supervisor is gone")
    parser.add_argument("server", nargs="+", help="program and arguments")
    args = parser.parse_args(argv)
    # The first process of a container may be the supervisor, which waits for no process but its own.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        guard = Guard(args.server)
    except OSError as error:
        print(f"error: {args.server[0]} can not be run: {error.strerror}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: guard.terminate())
    is_supervised = guard.run(sys.stdin.fileno())
    code = guard.finish()
    if not is_supervised:
        shutil.rmtree(args.remove, ignore_errors=True)
    return code


def _prepare() -> None:
    """Prepare the server's process; runs between fork and exec."""
    # The kernel kills it if the guard is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A dead server may have had its process id, as in a container that was restarted.
    with contextlib.suppress(OSError):
        _remove_sockets(os.getpid())


def _remove_sockets(server_pid: int) -> None:
    # A directory of that name that belongs to another user is left alone.
    with contextlib.suppress(StartupError):
        remove_runtime_directory(runtime_directory(server_pid))


if __name__ == "__main__":
    sys.exit(main())
