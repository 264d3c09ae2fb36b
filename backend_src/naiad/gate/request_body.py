"""Collects the body of an HTTP request."""

from __future__ import annotations

import re
from typing import Protocol

from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError
from naiad.gate.request_head import RequestHead, too_large

_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")
_MAX_SIZE_LINE = 10
_END = b"\r\n"


class Body(Protocol):
    """A body that is being received.

    Attributes:
        content: what has come of it.
    """

    content: bytearray

    def take(self, received: bytearray) -> bool:
        """Remove from `received` what belongs to the body; return whether it is complete.

        Raises:
            RefusedError: it is malformed, or too large.
        """


def body_of(head: RequestHead, limits: Limits) -> Body:
    """Return what collects the body of this request."""
    return ChunkedBody(limits) if head.is_chunked else PlainBody(head.content_length())


class PlainBody:
    """A body of a known size."""

    def __init__(self, num_bytes: int) -> None:
        """Set up; nothing has come."""
        self.content = bytearray()
        self._num_bytes = num_bytes

    def take(self, received: bytearray) -> bool:
        """Remove from `received` what belongs to the body; return whether it is complete."""
        missing = self._num_bytes - len(self.content)
        self.content += received[:missing]
        del received[:missing]
        return len(self.content) == self._num_bytes


class ChunkedBody:
    """A body in chunks, without extensions and trailers."""

    def __init__(self, limits: Limits) -> None:
        """Set up; nothing has come."""
        self.content = bytearray()
        self._limits = limits
        self._num_chunks = 0
        # Of the current chunk, with the line break behind it; None: its size has not come.
        self._missing: int | None = None
        self._is_last = False

    def take(self, received: bytearray) -> bool:
        """Remove from `received` what belongs to the body; return whether it is complete.

        Raises:
            RefusedError: it is malformed, too large, or has too many chunks.
        """
        at = 0
        is_complete = False
        while not is_complete:
            if self._missing is None:
                end = received.find(_END, at, at + _MAX_SIZE_LINE)
                if end < 0:
                    if len(received) - at >= _MAX_SIZE_LINE:
                        raise RefusedError(400, "a chunk does not begin with its size")
                    break
                self._begin(bytes(received[at:end]))
                at = end + len(_END)
            assert self._missing is not None
            taken = received[at : at + self._missing]
            at += len(taken)
            self._missing -= len(taken)
            self.content += taken
            if self._missing:
                break
            is_complete = self._end()
        del received[:at]
        return is_complete

    def _begin(self, size: bytes) -> None:
        if not _SIZE.fullmatch(size):
            raise RefusedError(400, "a chunk does not begin with its size")
        num_bytes = int(size, 16)
        self._num_chunks += 1
        if self._num_chunks > self._limits.max_chunks:
            raise RefusedError(
                413, f"the body has too many chunks: expected at most {self._limits.max_chunks}"
            )
        if len(self.content) + num_bytes > self._limits.max_body_bytes:
            raise too_large(self._limits)
        self._is_last = num_bytes == 0
        self._missing = num_bytes + len(_END)

    def _end(self) -> bool:
        """End the chunk; return whether it was the last one."""
        if not self.content.endswith(_END):
            raise RefusedError(400, "a chunk does not end where its size says, or the body has trailers")
        del self.content[-len(_END) :]
        self._missing = None
        return self._is_last
