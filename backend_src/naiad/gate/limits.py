"""What a client may send, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of both doors; those without "gRPC" in their text are HTTP's.

    Attributes:
        max_body_bytes: largest body of a request, and largest gRPC message.
        max_bodies_bytes: bodies that are being received, of all connections of a door together; gRPC too,
            with what clients do not read of answers.
        max_inflated_bytes: of gRPC requests, those that came compressed, while they wait for the server.
        max_head_bytes: request line and headers; also what a client may send ahead of its next request.
        max_headers: number of headers.
        max_chunks: number of chunks of a body.
        max_depth: nesting of JSON.
        max_containers: lists and objects of JSON.
        max_tensors: inputs, and outputs, of a request; gRPC too.
        max_connections: connections of a port, and gRPC calls, at the same time.
        head_s: how long request line and headers may take, and a gRPC client's first and every other frame;
            also how long a gRPC call may bring nothing when room is short.
        body_s: how long a body may take, and a gRPC message; also how long a gRPC stream may be quiet between
            two messages when room is short.
        idle_s: how long a connection may be without a request.
        slow_reader_s: a client that takes no part of its answer for so long is gone; gRPC too.
    """

    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 256 << 20
    max_inflated_bytes: int = 64 << 20
    max_head_bytes: int = 16 << 10
    max_headers: int = 64
    max_chunks: int = 16_384
    max_depth: int = 32
    max_containers: int = 10_000
    max_tensors: int = 256
    max_connections: int = 1024
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    slow_reader_s: float = 60.0
