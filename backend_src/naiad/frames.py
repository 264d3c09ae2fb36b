"""Frames on a byte stream between processes: a 4-byte little-endian length and a body."""

from __future__ import annotations

import struct

MAX_FRAME_BYTES = 512 * 1024 * 1024
_LENGTH = struct.Struct("<I")


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

    def feed(self, data: bytes) -> list[bytes]:
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
