"""Ends a process that must not outlive its parent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_CHECK_S = 0.5


def end_with_parent(before_exit: Callable[[], None]) -> None:
    """Start a daemon thread that exits this process as soon as its parent is gone.

    Triton's stubs need it because they outlive a server that is killed. PR_SET_PDEATHSIG does not
    help: it is tied to the server's thread that started the stub, which ends early.

    Args:
        before_exit: called in that thread before the exit; it should remove files that would be left
            over.
    """
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_CHECK_S)
        try:
            before_exit()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
