"""`Channel`: whole frames over a blocking socket."""

from __future__ import annotations

import socket
import time
from collections import deque

from naiad.frames import FrameBuffer, frame

_RECEIVE_BYTES = 1 << 18


class Channel:
    """One end of a stream socket between two processes."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._connection = connection
        self._frames = FrameBuffer()
        self._bodies: deque[bytes] = deque()

    def send(self, body: bytes) -> None:
        """Send one frame body.

        Raises:
            OSError: the other end is gone.
        """
        self._connection.sendall(frame(body))

    def receive(self) -> bytes:
        """Wait for the next frame body.

        Raises:
            EOFError: the other end has closed.
            OSError: the connection is broken.
        """
        while not self._bodies:
            bodies = self._frames.receive(self._connection)
            if bodies is None:
                raise EOFError
            self._bodies.extend(bodies)
        return self._bodies.popleft()

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the other end closes in this time; what it sends meanwhile is lost."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                self._connection.settimeout(left_s)
                if not self._connection.recv(_RECEIVE_BYTES):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Close the connection; the other end then sees its end."""
        self._connection.close()
