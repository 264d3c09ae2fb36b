"""Messages in a gRPC stream: five bytes, compressed or not and the length, and the message."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from naiad.gate.grpc_status import GRPCRefusedError, Status

PREFIX = struct.Struct(">BL")
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
ENCODINGS = ("identity", *sorted(_WINDOW_BITS))


def framed(message: bytes) -> bytes:
    """Return a message as it stands in a stream."""
    return PREFIX.pack(0, len(message)) + message


class Message(NamedTuple):
    """A message as it came."""

    content: bytes
    is_compressed: bool


class MessageReader:
    """Collects the messages of a request.

    Attributes:
        since_s: when the message that is coming began; None: none has begun.
    """

    def __init__(self, encoding: str, max_bytes: int) -> None:
        """Set up.

        Args:
            encoding: one of `ENCODINGS`.
            max_bytes: largest message, before and after inflation.
        """
        self.since_s: float | None = None
        self._last_s = 0.0
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._received = bytearray()

    @property
    def num_bytes(self) -> int:
        """Number of bytes that have come and that no message was made of."""
        return len(self._received)

    def add(self, data: bytes, now_s: float) -> None:
        """Take what has come."""
        if self.since_s is None:
            self.since_s = now_s
        self._last_s = now_s
        self._received += data

    def drop(self) -> None:
        """Forget what has come."""
        self._received.clear()

    @property
    def is_ready(self) -> bool:
        """Whether the next message has come, or so much of it that it is refused."""
        if len(self._received) < PREFIX.size:
            return False
        flag, size = PREFIX.unpack_from(self._received)
        return bool(flag > 1 or size > self._max_bytes or len(self._received) >= PREFIX.size + size)

    def next(self) -> Message | None:
        """Return the next message, which `inflated` makes readable; None: it has not come yet.

        Raises:
            GRPCRefusedError: it is too large or malformed.
        """
        if not self.is_ready:
            return None
        flag, size = PREFIX.unpack_from(self._received)
        if size > self._max_bytes:
            text = f"a message of {size} bytes: expected at most {self._max_bytes}"
            raise GRPCRefusedError(Status.RESOURCE_EXHAUSTED, text)
        if flag > 1:
            raise GRPCRefusedError(Status.INTERNAL, f"a message begins with {flag}: expected 0 or 1")
        end = PREFIX.size + size
        content = bytes(self._received[PREFIX.size : end])
        del self._received[:end]
        self.since_s = self._last_s if self._received else None
        return Message(content, bool(flag))

    def check_end(self) -> None:
        """Check that the request does not end within a message.

        Raises:
            GRPCRefusedError: it does.
        """
        if self._received:
            raise GRPCRefusedError(Status.INTERNAL, "the request ends within a message")

    def inflated(self, message: Message) -> bytes:
        """Return what a message says.

        Raises:
            GRPCRefusedError: it is too large, or not compressed as the request's head says.
        """
        if not message.is_compressed:
            return message.content
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise GRPCRefusedError(Status.INTERNAL, "a message is compressed, but grpc-encoding names no way")
        inflater = zlib.decompressobj(bits)
        try:
            inflated = inflater.decompress(message.content, self._max_bytes + 1)
        except zlib.error:
            raise GRPCRefusedError(
                Status.INTERNAL, f"a message can not be inflated as {self._encoding}"
            ) from None
        if len(inflated) > self._max_bytes:
            text = f"a message that is larger than {self._max_bytes} bytes when it is inflated"
            raise GRPCRefusedError(Status.RESOURCE_EXHAUSTED, text)
        if not inflater.eof or inflater.unused_data:
            raise GRPCRefusedError(Status.INTERNAL, f"a message is not one piece of {self._encoding}")
        return inflated


class MessageBoundary:
    """Knows whether an answer is between two of its messages, where one of the gate's own can be put.

    Attributes:
        num_missing: bytes that the current message still needs; its prefix is known.
        first_byte: of the first message that has any; None: none has come.
    """

    __slots__ = ("_prefix", "first_byte", "num_missing")

    def __init__(self) -> None:
        """Set up at the beginning of an answer."""
        self.num_missing = 0
        self.first_byte: int | None = None
        self._prefix = b""

    @property
    def is_here(self) -> bool:
        """Whether the last message is complete and no other one has begun."""
        return not self.num_missing and not self._prefix

    def follow(self, data: bytes | bytearray, at: int, end: int) -> None:
        """Go past `data[at:end]`, the next part of the answer."""
        if at + 5 <= end and not self.num_missing and not self._prefix:
            # Nearly every frame is one message.
            size = PREFIX.unpack_from(data, at)[1]
            if at + 5 + size == end:
                if self.first_byte is None and size:
                    self.first_byte = data[at + 5]
                return
        while at < end:
            if self.num_missing:
                if self.first_byte is None:
                    self.first_byte = data[at]
                step = min(self.num_missing, end - at)
                self.num_missing -= step
                at += step
                continue
            step = min(PREFIX.size - len(self._prefix), end - at)
            self._prefix += data[at : at + step]
            at += step
            if len(self._prefix) == PREFIX.size:
                self.num_missing = PREFIX.unpack(self._prefix)[1]
                self._prefix = b""
