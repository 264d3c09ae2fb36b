"""Header blocks of HTTP/2: those of clients are decoded; the gate's own use no table."""

from __future__ import annotations

from collections.abc import Iterable

from hpack import Decoder, HPACKError

from naiad.gate.http2_frames import (
    COMPRESSION_ERROR,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    PROTOCOL_ERROR,
    ConnectionFaultError,
    Frame,
    content,
)

Fields = tuple[tuple[bytes, bytes], ...]

# A block that is larger, encoded or decoded, ends the connection: what it says about the table is lost.
MAX_BLOCK_BYTES = 32 << 10
_MAX_CONTINUATIONS = 8
# The table has no room from here on. It never has in the gate's blocks; a client may wait to hear it.
NO_TABLE = b"\x20"


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block that neither reads nor changes a table."""
    parts = [NO_TABLE]
    for name, value in fields:
        parts += (b"\0", _length(len(name)), name, _length(len(value)), value)
    return b"".join(parts)


def _length(number: int) -> bytes:
    if number < 0x7F:
        return bytes((number,))
    number -= 0x7F
    encoded = bytearray(b"\x7f")
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class Block:
    """A header block that comes in one or more frames."""

    def __init__(self, first: Frame) -> None:
        """Begin with a frame of HEADERS.

        Raises:
            ConnectionFaultError: it is malformed.
        """
        self.stream_id = first.stream_id
        self.ends_stream = bool(first.flags & END_STREAM)
        self.is_complete = bool(first.flags & END_HEADERS)
        self.encoded = content(first)
        self._num_continuations = 0

    def add(self, each: Frame) -> None:
        """Take a frame of CONTINUATION.

        Raises:
            ConnectionFaultError: it belongs to another stream, or the block is too large.
        """
        if each.stream_id != self.stream_id:
            raise ConnectionFaultError(PROTOCOL_ERROR, "CONTINUATION of another stream")
        self._num_continuations += 1
        self.encoded += each.payload
        if self._num_continuations > _MAX_CONTINUATIONS or len(self.encoded) > MAX_BLOCK_BYTES:
            raise ConnectionFaultError(ENHANCE_YOUR_CALM, "a header block is too large")
        self.is_complete = bool(each.flags & END_HEADERS)


class BlockDecoder:
    """Decodes the blocks of one connection, in their order."""

    def __init__(self) -> None:
        """Set up."""
        self._decoder = Decoder(max_header_list_size=MAX_BLOCK_BYTES)

    def decode(self, encoded: bytes) -> Fields:
        """Return the fields of a block.

        Raises:
            ConnectionFaultError: it is malformed or too large.
        """
        try:
            decoded = self._decoder.decode(encoded, raw=True)
        except HPACKError:
            text = "a header block is malformed or too large"
            raise ConnectionFaultError(COMPRESSION_ERROR, text) from None
        return tuple((bytes(name), bytes(value)) for name, value in decoded)


def begun(each: Frame) -> Block:
    """Return the block that a frame begins.

    Raises:
        ConnectionFaultError: it begins none.
    """
    if each.kind != HEADERS:
        raise ConnectionFaultError(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
    return Block(each)
