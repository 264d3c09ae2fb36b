"""The head of a gRPC request: what it may contain, and how it is sent on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from naiad.gate.grpc_framing import ENCODINGS
from naiad.gate.grpc_methods import REFUSED_METADATA, MethodKind, refusal_of
from naiad.gate.grpc_status import CONTENT_TYPE, GRPCRefusedError, Status
from naiad.gate.header_blocks import Fields
from naiad.gate.headers import passed_headers

MAX_METADATA_BYTES = 16 << 10
# What HTTP/2 counts for a field beside its name and value.
_FIELD_BYTES = 32
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_NEEDED = _PSEUDO - {b":authority"}
# They speak of a connection, which HTTP/2 has other means for.
_OF_CONNECTIONS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_NAME = re.compile(rb"[0-9a-z!#$%&'*+.^_`|~-]+")
# Octets of a value that would end or cut a line where it is copied.
_NOT_IN_A_VALUE = re.compile(rb"[\0\r\n]")
_TIMEOUT = re.compile(rb"[0-9]{1,8}[HMSmun]")
_SECONDS_OF = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE = re.compile(rb"application/grpc(\+proto)?( *;.*)?", re.IGNORECASE)


class MalformedError(Exception):
    """A head is no request of HTTP/2: the stream ends with PROTOCOL_ERROR."""


@dataclass(frozen=True, slots=True)
class GRPCHead:
    """A head that passes.

    Attributes:
        path: the method's path.
        kind: how the method passes.
        encoding: how messages are compressed, if they are.
        timeout: the client's deadline as it stands in grpc-timeout; None: there is none. The server gets that
            of unary calls only, because it never lets go of some streams whose deadline passes.
        metadata: the metadata to send on.
    """

    path: str
    kind: MethodKind
    encoding: str
    timeout: bytes | None
    metadata: tuple[tuple[str, str], ...]

    @property
    def timeout_s(self) -> float:
        """The client's deadline, in seconds from the beginning of the call."""
        if self.timeout is None:
            return math.inf
        return int(self.timeout[:-1]) * _SECONDS_OF[self.timeout[-1:]]

    def fields(self, authority: str) -> Fields:
        """Return the fields that the server gets."""
        if self.timeout is None or self.kind == "stream":
            timeout: Fields = ()
        else:
            timeout = ((b"grpc-timeout", self.timeout),)
        return (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", self.path.encode()),
            (b":authority", authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", CONTENT_TYPE),
            (b"user-agent", b"naiad-gate"),
            *timeout,
            *((name.encode(), value.encode()) for name, value in self.metadata),
        )


def read_grpc_head(sent: Fields, methods: Mapping[str, MethodKind]) -> GRPCHead:
    """Return the head of a request, checked.

    Raises:
        MalformedError: it is no request.
        GRPCRefusedError: it does not pass.
    """
    _check_form(sent)
    num_bytes = sum(len(name) + len(value) + _FIELD_BYTES for name, value in sent)
    if num_bytes > MAX_METADATA_BYTES:
        text = f"metadata of {num_bytes} bytes: expected at most {MAX_METADATA_BYTES}"
        raise GRPCRefusedError(Status.RESOURCE_EXHAUSTED, text)
    fields = dict(sent)
    path = fields[b":path"].decode("latin-1")
    kind = methods.get(path)
    if kind is None:
        raise GRPCRefusedError(Status.UNIMPLEMENTED, f"{path[:200]}: {refusal_of(path)}")
    metadata = [(name.decode(), value.decode("latin-1")) for name, value in sent if name not in _PSEUDO]
    if any(name == REFUSED_METADATA for name, _ in metadata):
        text = f"the header {REFUSED_METADATA} does not pass the gate: a stream has errors in its messages"
        raise GRPCRefusedError(Status.INVALID_ARGUMENT, text)
    return GRPCHead(path, kind, _encoding(fields), _timeout(fields), passed_headers(metadata))


def _check_form(sent: Fields) -> None:
    pseudo = [name for name, _ in sent if name[:1] == b":"]
    if set(pseudo) - _PSEUDO or _NEEDED - set(pseudo) or len(set(pseudo)) < len(pseudo):
        raise MalformedError("expected :method, :scheme, :path and :authority once each")
    if pseudo != [name for name, _ in sent[: len(pseudo)]]:
        raise MalformedError("expected :method, :scheme, :path and :authority first")
    for name, value in sent:
        if name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
            raise MalformedError("a field of another version of HTTP")
        if name[:1] != b":" and not _NAME.fullmatch(name):
            raise MalformedError("a field's name has letters that are not allowed")
        if _NOT_IN_A_VALUE.search(value):
            raise MalformedError("a field's value has line breaks")
    fields = dict(sent)
    if fields[b":method"] != b"POST" or not _CONTENT_TYPE.fullmatch(fields.get(b"content-type", b"")):
        raise MalformedError("expected POST, and application/grpc as content-type")


def _encoding(fields: Mapping[bytes, bytes]) -> str:
    encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
    if encoding not in ENCODINGS:
        text = f"grpc-encoding = {encoding[:80]!r}: expected one of {', '.join(ENCODINGS)}"
        raise GRPCRefusedError(Status.UNIMPLEMENTED, text)
    return encoding


def _timeout(fields: Mapping[bytes, bytes]) -> bytes | None:
    timeout = fields.get(b"grpc-timeout")
    if timeout is not None and not _TIMEOUT.fullmatch(timeout):
        text = f"grpc-timeout = {timeout[:80].decode('latin-1')!r}"
        raise GRPCRefusedError(
            Status.INVALID_ARGUMENT, f"{text}: expected up to 8 digits and one of H, M, S, m, u, n"
        )
    return timeout
