"""Closes the sockets that a model's process has got from the server that started it."""

from __future__ import annotations

import contextlib
import os
import stat

_FIRST_OF_ITS_OWN = 3  # after standard input, output and error


def close_inherited_sockets() -> None:
    """Close every socket that a child of this process would get; call it before any library opens sockets.

    tritonserver does not mark its sockets close-on-exec. The process of a model that is loaded later has them
    all: listening ones, which keep their ports in use after the server has ended, and those of HTTP clients,
    which see no end of their connection until this process ends. Python marks the sockets that it opens.
    """
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
            if is_socket and descriptor >= _FIRST_OF_ITS_OWN and os.get_inheritable(descriptor):
                os.close(descriptor)
