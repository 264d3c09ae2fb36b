"""Frames on a byte stream between processes: a 4-byte little-endian length and a body."""

from __future__ import annotations

import socket
import struct

MAX_FRAME_BYTES = 512 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 16


def frame(body: bytes) -> bytes:
    """The body as one frame.

    Raises:
        ValueError: the body is larger than `MAX_FRAME_BYTES`, which no reader takes.
    """
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream back into frame bodies."""

    def __init__(self) -> None:
        """Start empty."""
        self._bytes = bytearray()
        # Made once: a call of `recv` would make it each time, and the small message that it leaves at the
        # beginning keeps the C library from using the place for the next one.
        self._received: memoryview | None = None

    def receive(self, connection: socket.socket) -> list[bytes] | None:
        """Read once from a socket.

        Returns:
            The bodies that are now complete; None: the other end has closed.

        Raises:
            OSError: the connection is broken, or has nothing to read now.
            ValueError: as for `feed`.
        """
        if self._received is None:
            self._received = memoryview(bytearray(_RECEIVE_BYTES))
        num_bytes = connection.recv_into(self._received)
        return self.feed(self._received[:num_bytes]) if num_bytes else None

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Take the bytes that arrived; return the bodies that are now complete.

        Raises:
            ValueError: a frame announces more than `MAX_FRAME_BYTES`.
        """
        self._bytes += data
        bodies = []
        start = 0
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = start + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[start + _LENGTH.size : end]))
            start = end
        del self._bytes[:start]
        return bodies
