"""Ends a process that must not outlive its parent."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

_CHECK_S = 0.5


def end_with_parent(before_exit: Callable[[], None], parent_pid: int | None = None) -> None:
    """Start a daemon thread that exits this process as soon as its parent is gone.

    Triton's stubs need it because they outlive a server that is killed. PR_SET_PDEATHSIG does not
    help: it is tied to the server's thread that started the stub, which ends early.

    Args:
        before_exit: called in that thread before the exit; it should remove files that would be left
            over.
        parent_pid: of the parent, which may have ended before this call; None: it is there.
    """
    watched_pid = os.getppid() if parent_pid is None else parent_pid

    def watch() -> None:
        _wait_for_end(watched_pid)
        try:
            before_exit()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _wait_for_end(parent_pid: int) -> None:
    """Return when the parent has ended; the kernel says so, or is asked where it can not."""
    try:
        parent = os.pidfd_open(parent_pid)
    except OSError:
        # A sandbox may have no such descriptors; or the parent is gone, or outside the PID namespace.
        while os.getppid() == parent_pid:
            time.sleep(_CHECK_S)
        return
    # If it ended before, another process may have its id by now.
    if os.getppid() == parent_pid:
        end = select.poll()
        end.register(parent, select.POLLIN)
        end.poll()
