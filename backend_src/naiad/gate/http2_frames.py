"""Frames of HTTP/2: how they are read, and how the gate writes its own."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from naiad.errors import NaiadError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Of a payload. The smallest limit that an endpoint can have, so that nobody has to be asked for his.
MAX_FRAME_BYTES = 16_384
MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65_535
# Length of the payload (its upper 16 and its lower 8 bits), type, flags, stream.
HEAD = struct.Struct(">HBBBL")
WORD = struct.Struct(">L")
_SETTING = struct.Struct(">HL")

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9

END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11


class ConnectionFaultError(NaiadError):
    """A peer has broken HTTP/2's rules, or floods: the connection has to end.

    Attributes:
        code: HTTP/2's code of the error.
    """

    def __init__(self, code: int, message: str) -> None:
        """Set up."""
        super().__init__(message)
        self.code = code


class Frame(NamedTuple):
    """A complete frame."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Cuts what a client sends into frames, however it is cut when it comes."""

    def __init__(self) -> None:
        """Set up; the connection's preface comes first."""
        self._unread = bytearray()
        self._has_preface = False

    @property
    def is_within_frame(self) -> bool:
        """Whether a part of a frame has come."""
        return bool(self._unread)

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now.

        Raises:
            ConnectionFaultError: this is no HTTP/2, or a frame is too large.
        """
        self._unread += data
        if not self._has_preface:
            if not PREFACE.startswith(self._unread[: len(PREFACE)]):
                raise ConnectionFaultError(PROTOCOL_ERROR, "expected HTTP/2's preface")
            if len(self._unread) < len(PREFACE):
                return
            self._has_preface = True
            del self._unread[: len(PREFACE)]
        at = 0
        try:
            while len(self._unread) - at >= HEAD.size:
                high, low, kind, flags, stream_id = HEAD.unpack_from(self._unread, at)
                size = high << 8 | low
                if size > MAX_FRAME_BYTES:
                    message = f"a frame of {size} bytes: expected at most {MAX_FRAME_BYTES}"
                    raise ConnectionFaultError(FRAME_SIZE_ERROR, message)
                end = at + HEAD.size + size
                if end > len(self._unread):
                    return
                payload = bytes(self._unread[at + HEAD.size : end])
                at = end
                yield Frame(kind, flags, stream_id & MAX_WINDOW, payload)
        finally:
            del self._unread[:at]


def frame(kind: int, flags: int, stream_id: int, payload: bytes | bytearray = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """Return a frame of settings."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in values.items()))


def window_update(stream_id: int, num_bytes: int) -> bytes:
    """Return a frame that lets the peer send more; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, WORD.pack(num_bytes))


def rst_stream(stream_id: int, code: int) -> bytes:
    """Return a frame that ends a stream."""
    return frame(RST_STREAM, 0, stream_id, WORD.pack(code))


def goaway(last_stream_id: int, code: int, message: str = "") -> bytes:
    """Return a frame after which no new streams are served."""
    return frame(GOAWAY, 0, 0, WORD.pack(last_stream_id) + WORD.pack(code) + message.encode()[:256])


def data_frames(stream_id: int, payload: bytes) -> bytes:
    """Return the frames of a part of a stream."""
    steps = range(0, len(payload), MAX_FRAME_BYTES)
    return b"".join(frame(DATA, 0, stream_id, payload[at : at + MAX_FRAME_BYTES]) for at in steps)


def header_frames(stream_id: int, block: bytes, *, ends: bool) -> bytes:
    """Return the frames of a header block; `ends`: it is the last that the stream gets."""
    parts = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)] or [b""]
    last = len(parts) - 1
    written = []
    for index, part in enumerate(parts):
        flags = END_HEADERS if index == last else 0
        flags |= END_STREAM if ends and index == 0 else 0
        written.append(frame(CONTINUATION if index else HEADERS, flags, stream_id, part))
    return b"".join(written)


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the settings of a frame; of one that comes twice the last counts.

    Raises:
        ConnectionFaultError: a value is not allowed.
    """
    if len(payload) % _SETTING.size:
        raise ConnectionFaultError(FRAME_SIZE_ERROR, "settings that are cut off")
    values: dict[int, int] = dict(_SETTING.iter_unpack(payload))
    if values.get(ENABLE_PUSH, 0) > 1:
        raise ConnectionFaultError(PROTOCOL_ERROR, "ENABLE_PUSH: expected 0 or 1")
    if values.get(INITIAL_WINDOW_SIZE, 0) > MAX_WINDOW:
        raise ConnectionFaultError(FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE: expected at most {MAX_WINDOW}")
    if not MAX_FRAME_BYTES <= values.get(MAX_FRAME_SIZE, MAX_FRAME_BYTES) < 1 << 24:
        text = f"MAX_FRAME_SIZE: expected {MAX_FRAME_BYTES} to {2**24 - 1}"
        raise ConnectionFaultError(PROTOCOL_ERROR, text)
    return values


def read_word(each: Frame) -> int:
    """Return the number that a frame consists of.

    Raises:
        ConnectionFaultError: its size is another.
    """
    if len(each.payload) != WORD.size:
        raise ConnectionFaultError(FRAME_SIZE_ERROR, f"a frame of type {each.kind}: expected 4 bytes")
    return int(WORD.unpack(each.payload)[0])


def content(each: Frame) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority.

    Raises:
        ConnectionFaultError: there is more padding than payload.
    """
    payload = each.payload
    begin, end = 0, len(payload)
    if each.flags & PADDED:
        begin = 1
        end -= payload[0] if payload else 1
    if each.kind == HEADERS and each.flags & HAS_PRIORITY:
        begin += 5
    if begin > end:
        raise ConnectionFaultError(PROTOCOL_ERROR, f"a frame of type {each.kind} is all padding")
    return payload[begin:end]
