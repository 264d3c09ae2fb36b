"""One client's HTTP connection: its requests are checked and sent on, one after the other."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any, Literal, Protocol

from naiad.gate.headers import passed_headers
from naiad.gate.json_body import checked_inference, checked_json
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError
from naiad.gate.request_body import Body, body_of
from naiad.gate.request_head import END, RequestHead, read_head
from naiad.gate.routes import Route
from naiad.gate.upstream import Upstream

# draining: refused, but the client still sends; closed: the rest of an answer is being sent.
State = Literal["idle", "head", "body", "answer", "draining", "closed"]

# A client that stops to read is noticed when these are full.
_WRITE_BUFFER_BYTES = 64 * 1024
_SEND_BUFFER_BYTES = 128 * 1024
# What counts as reading: a client that takes less than this holds its request up on purpose.
_READING_BYTES = 16 * 1024
_INFERENCE_LENGTH = "inference-header-content-length"
_CONTINUE = "100-continue"
_LENGTH = re.compile(r"[0-9]{1,12}")
# A client that is refused reads its answer only when it has sent its body.
_MAX_DRAINED_BYTES = 16 << 20
# How long it may go on sending when it has been told.
_LAST_S = 5.0


class Door(Protocol):
    """The port that connections come through; see `HTTPDoor`."""

    limits: Limits
    server: tuple[str, int]
    is_stopping: bool
    num_refused: int
    num_slow_readers: int

    @property
    def server_address(self) -> str:
        """HOST:PORT of the server behind it."""

    def admit(self, connection: ClientConnection) -> bool:
        """Take a new connection, if there is room."""

    def forget(self, connection: ClientConnection) -> None:
        """A connection has ended."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes of bodies that are being received, or refuse them."""

    def release(self, num_bytes: int) -> None:
        """These bytes are no longer held."""

    def check(self, head: RequestHead) -> Route:
        """Return the route of a request, or refuse it."""


class ClientConnection(asyncio.Protocol):
    """The connection; it belongs to the door that it came through."""

    def __init__(self, door: Door) -> None:
        """Set up."""
        self._door = door
        self._limits = door.limits
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._received = bytearray()
        self._head: RequestHead | None = None
        self._route: Route | None = None
        self._body: Body | None = None
        self._num_held_bytes = 0
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._has_answered = False
        self._is_paused = False
        self._enter("head")
        self._num_drained_bytes = 0

    @property
    def is_waiting(self) -> bool:
        """Whether no request is under way."""
        return self._state in ("idle", "head")

    @property
    def closes_after_answer(self) -> bool:
        """Whether the connection is closed after the current answer."""
        return self._head is None or self._head.closes or self._door.is_stopping

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = transport
        if not self._door.admit(self):
            # It is not watched, so that nothing is waited for.
            refusal = RefusedError(503, "too many connections", "Retry-After: 1\r\n")
            self._transport.write(refusal.answer(closes=True))
            self.close()
            return
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: its request ends."""
        self._state = "closed"
        self._door.forget(self)
        self._release_body()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.close()

    def eof_received(self) -> bool:
        """The client has closed the connection."""
        if self._state == "answer":
            self._transport.abort()
        return False

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._state in ("draining", "closed"):
            self._num_drained_bytes += len(data)
            if self._num_drained_bytes > _MAX_DRAINED_BYTES:
                self._transport.abort()
            return
        self._received += data
        try:
            self._advance()
        except RefusedError as refusal:
            self._close_with(refusal)

    def pause_writing(self) -> None:
        """The client does not read as fast as the answer comes."""
        self._is_paused = True
        self._note_progress(self._transport.get_write_buffer_size())
        if self._upstream is not None:
            self._upstream.pause()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._is_paused = False
        if self._upstream is not None and self._upstream.is_open:
            self._upstream.resume()

    def pass_on(self, data: bytes) -> None:
        """Send a part of an answer."""
        self._has_answered = True
        self._transport.write(data)

    def answer_ended(self) -> None:
        """The answer is complete: take the next request."""
        if self._state != "answer":
            return
        closes = self.closes_after_answer
        self._head = self._route = None
        self._enter("idle")
        if closes:
            self.close()
        elif self._received:
            self.data_received(b"")

    def upstream_lost(self, upstream: Upstream) -> None:
        """The server has closed this connection."""
        if upstream is self._upstream:
            self._upstream = None
            if self._state == "answer":
                self._end_without_server()

    def look(self, now_s: float) -> None:
        """End the connection if the client takes too long; called every second or so."""
        waited_s = now_s - self._since_s
        if self._state in ("head", "body"):
            if waited_s > (self._limits.head_s if self._state == "head" else self._limits.body_s):
                self._close_with(RefusedError(408, f"the request did not come within {waited_s:.0f} s"))
        elif self._num_unsent and (self._is_paused or self._state != "answer"):
            self._look_at_reading(waited_s)
        elif self._state == "idle":
            if waited_s > self._limits.idle_s:
                self.close()
        elif self._state in ("draining", "closed") and waited_s > _LAST_S:
            self._transport.abort()

    def _look_at_reading(self, waited_s: float) -> None:
        """End the connection if the client takes too little of what waits for it."""
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent <= max(0, self._num_unsent - _READING_BYTES):
            self._note_progress(num_unsent)
        elif waited_s > self._limits.slow_reader_s:
            self._door.num_slow_readers += 1
            self._transport.abort()

    def close(self) -> None:
        """Close when everything is sent."""
        self._enter("closed")
        self._transport.close()

    def _enter(self, state: State) -> None:
        self._state = state
        self._note_progress(0 if self._transport is None else self._transport.get_write_buffer_size())

    def _note_progress(self, num_unsent: int) -> None:
        self._num_unsent, self._since_s = num_unsent, self._loop.time()

    def _advance(self) -> None:
        """Take from what has come as much as can be taken now."""
        if self._state == "idle" and self._received:
            self._enter("head")
        if self._state == "head":
            self._take_head()
        if self._state == "body":
            self._take_body()
        if self._state == "answer" and len(self._received) > self._limits.max_head_bytes:
            # Its answer is under way, so that no other one can be sent.
            self._transport.abort()

    def _take_head(self) -> None:
        end = self._received.find(END, 0, self._limits.max_head_bytes)
        if end < 0:
            if len(self._received) >= self._limits.max_head_bytes:
                raise RefusedError(
                    431, f"the headers are too long: expected {self._limits.max_head_bytes} bytes at most"
                )
            return
        head = read_head(bytes(self._received[:end]), self._limits)
        del self._received[: end + len(END)]
        self._route = self._door.check(head)
        self._head, self._body = head, body_of(head, self._limits)
        self._has_answered = False
        self._enter("body")
        if head.headers.get("expect", "").lower() == _CONTINUE and not self._received:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _take_body(self) -> None:
        assert self._body is not None
        is_complete = self._body.take(self._received)
        num_bytes = len(self._body.content)
        self._door.hold(num_bytes - self._num_held_bytes)
        self._num_held_bytes = num_bytes
        if is_complete:
            request = self._checked_request(bytes(self._body.content))
            self._release_body()
            self._enter("answer")
            self._send(request)

    def _release_body(self) -> None:
        self._body = None
        self._door.release(self._num_held_bytes)
        self._num_held_bytes = 0

    def _checked_request(self, body: bytes) -> bytes:
        """Return the request as the server gets it: nothing of it is copied that was not read.

        Raises:
            RefusedError: the body does not pass.
        """
        assert self._head is not None
        assert self._route is not None
        length = None
        if self._route.body == "infer":
            text = self._head.headers.get(_INFERENCE_LENGTH)
            if text is not None and not _LENGTH.fullmatch(text):
                raise RefusedError(400, "Inference-Header-Content-Length is no number of bytes")
            body, length = checked_inference(body, None if text is None else int(text), self._limits)
        elif self._route.body == "json":
            body = checked_json(body, self._limits)
        elif self._route.body == "json or none":
            body = checked_json(body, self._limits) if body.strip() else b""
        elif body:
            raise RefusedError(400, f"{self._head.target[:200]}: expected no body")
        lines = [f"{self._head.method} {self._head.target} HTTP/1.1", f"Host: {self._door.server_address}"]
        if self._route.body != "none":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if length is not None:
            lines.append(f"Inference-Header-Content-Length: {length}")
        lines += [f"{name}: {value}" for name, value in passed_headers(self._head.headers.items())]
        return "\r\n".join(lines).encode("latin-1") + END + body

    def _send(self, request: bytes) -> None:
        if self._upstream is not None and self._upstream.is_open:
            self._upstream.send(request)
        else:
            self._connecting = self._loop.create_task(self._connect_and_send(request))

    async def _connect_and_send(self, request: bytes) -> None:
        try:
            _, upstream = await self._loop.create_connection(lambda: Upstream(self), *self._door.server)
        except OSError:
            self._end_without_server()
            return
        if self._state == "closed":
            upstream.close()
            return
        if upstream.is_open:
            self._upstream = upstream
            upstream.send(request)
        else:
            self._end_without_server()

    def _end_without_server(self) -> None:
        """End a request whose answer does not come any more."""
        if self._has_answered:
            # A client must not take the part that has come for the whole.
            self._transport.abort()
        else:
            message = "the server is not there; it may be restarting"
            self._close_with(RefusedError(503, message, "Retry-After: 2\r\n"))

    def _close_with(self, refusal: RefusedError) -> None:
        """Refuse, and close: what comes behind a refused request is not trusted."""
        self._door.num_refused += 1
        self._received.clear()
        self._release_body()
        self._transport.write(refusal.answer(closes=True))
        self._enter("draining")
        self._transport.write_eof()
