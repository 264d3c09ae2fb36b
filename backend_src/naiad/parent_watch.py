"""A process that must not outlive its parent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_CHECK_S = 0.5


def end_with_parent(before_exit: Callable[[], None]) -> None:
    """Start a daemon thread that ends this process, at once, when its parent is gone.

    For Triton's stubs, which outlive a killed server. PR_SET_PDEATHSIG would follow the
    server's thread that started the stub, and that one ends early.

    Args:
        before_exit: called in that thread first; should remove what would stay behind.
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
