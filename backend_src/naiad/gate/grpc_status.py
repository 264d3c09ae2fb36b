"""How a gRPC call ends that the gate itself ends."""

from __future__ import annotations

from enum import IntEnum

from naiad.errors import NaiadError
from naiad.gate.header_blocks import Fields

CONTENT_TYPE = b"application/grpc"
# Printable ASCII passes in a status message as it is.
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}
_MAX_MESSAGE_BYTES = 1024


class Status(IntEnum):
    """gRPC's codes, as far as the gate uses them."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class GRPCRefusedError(NaiadError):
    """A call does not pass, or has to end.

    Attributes:
        grpc_status: its status.
    """

    def __init__(self, status: Status, message: str) -> None:
        """Set up."""
        super().__init__(message)
        self.grpc_status = status


ANSWER_HEAD: Fields = (
    (b":status", b"200"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", b"identity,deflate,gzip"),
)


def trailers(status: Status, message: str) -> Fields:
    """Return the last fields of a call."""
    raw = message.encode(errors="replace")[:_MAX_MESSAGE_BYTES]
    quoted = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
    return ((b"grpc-status", b"%d" % status), (b"grpc-message", quoted.encode()))
