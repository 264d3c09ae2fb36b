"""The calls of one client's connection: each is checked, sent on, and ended when it has to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from naiad.gate import grpc_requests
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_answers import Answers
from naiad.gate.grpc_call import Call
from naiad.gate.grpc_head import MalformedError, read_grpc_head
from naiad.gate.grpc_methods import MethodKind
from naiad.gate.grpc_requests import MAX_WAITING_BYTES, Requests
from naiad.gate.grpc_status import ANSWER_HEAD, GRPCRefusedError, Status, trailers
from naiad.gate.grpc_upstream import Client, GRPCUpstream
from naiad.gate.header_blocks import Fields, encode

MAX_CALLS = 256
# A client is told to go on when so much has been taken.
_TAKEN_BYTES = 32 << 10
# What may wait of one answer for a client that does not read it.
_MAX_KEPT_BYTES = 256 << 10
_AWAY = "the server is not there; it may be restarting"
_NO_ROOM = "too many large requests come at the same time"


class Door(grpc_requests.Door, Protocol):
    """The port that connections come through; see `GRPCDoor`."""

    methods: Mapping[str, MethodKind]
    server_address: str
    num_slow_readers: int

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of the server behind it."""

    def admit_call(self) -> bool:
        """Count a new call, if there is room."""

    def call_ended(self) -> None:
        """A call that was counted is over."""

    def hold(self, num_bytes: int, num_inflated: int) -> bool:
        """Count bytes that are held of calls, if there is room; fewer of them with negative numbers."""


class Peer(Client, Protocol):
    """The client's connection; see `GRPCConnection`."""

    def note_fruitless(self) -> None:
        """A call has been opened for nothing."""

    def leave(self) -> None:
        """Take no new calls, and close when the last one has ended."""

    def calls_ended(self) -> None:
        """The last call is over."""


class Calls:
    """The calls.

    Attributes:
        is_leaving: whether new ones are refused, so that the client opens another connection.
    """

    def __init__(self, door: Door, peer: Peer) -> None:
        """Set up for this client."""
        self.is_leaving = False
        self._door = door
        self._limits = door.limits
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, Call] = {}
        # For a connection to the server, or for room on it.
        self._waiting: dict[int, Call] = {}
        # Refusals of heads, told when something follows them, or soon: grpc's own client takes an end that
        # overtakes its first message for a fault.
        self._refused: dict[int, GRPCRefusedError] = {}
        self._answers = Answers(peer, self)
        self._requests = Requests(door, self._answers, self._go_on)
        self._upstream: GRPCUpstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._has_server_left = self._is_closed = self._is_paused = False

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    def begin(self, stream_id: int, fields: Fields, *, ends: bool) -> None:
        """Take the head of a new call; `ends`: nothing follows it."""
        num_left = 0 if self._upstream is None else self._upstream.num_left
        if self.is_leaving or len(self._open) + num_left >= MAX_CALLS:
            self._reset(stream_id, http2.REFUSED_STREAM)
            return
        try:
            head = read_grpc_head(fields, self._door.methods)
            if not self._door.admit_call():
                text = f"expected at most {self._limits.max_connections} calls at the same time"
                raise GRPCRefusedError(Status.RESOURCE_EXHAUSTED, text)
        except MalformedError:
            self._door.num_refused += 1
            self._reset(stream_id, http2.PROTOCOL_ERROR)
            return
        except GRPCRefusedError as refusal:
            self._door.num_refused += 1
            self._peer.note_fruitless()
            self._refused[stream_id] = refusal
            if ends:
                self._tell_refusal(stream_id, has_client_ended=True)
            return
        call = Call(stream_id, head, self._limits, self._peer.initial_window, self._loop.time())
        self._open[stream_id] = call
        if call.is_stream:
            self._start(call)
        if ends:
            call.has_client_ended = True
            self._advance(call)

    def take(self, stream_id: int, data: bytes, num_bytes: int, *, ends: bool) -> None:
        """Take a part of a request; `num_bytes`: what it takes of the window, `ends`: it is the last.

        Raises:
            ConnectionFaultError: there may not be any more of it.
        """
        call = self._open.get(stream_id)
        if call is None:
            # The call has been ended meanwhile.
            self._tell_refusal(stream_id, has_client_ended=ends)
            return
        if call.has_client_ended:
            raise http2.ConnectionFaultError(http2.STREAM_CLOSED, "DATA behind the end of a stream")
        call.receive_window -= num_bytes
        if call.receive_window < 0:
            raise http2.ConnectionFaultError(http2.FLOW_CONTROL_ERROR, "more DATA than the stream's window")
        call.num_taken += num_bytes
        call.has_client_ended = ends
        if data:
            call.request.add(data, self._loop.time())
        self._advance(call)

    def reset(self, stream_id: int) -> None:
        """The client has ended a call."""
        self._peer.note_fruitless()
        self._refused.pop(stream_id, None)
        call = self._open.get(stream_id)
        if call is not None:
            if self._upstream is not None:
                self._upstream.cancel(call)
            self.forget(call)

    def grant(self, stream_id: int, num_bytes: int) -> None:
        """The client takes more of an answer; 0 bytes are a fault of the stream.

        Raises:
            ConnectionFaultError: its window is too large.
        """
        call = self._open.get(stream_id)
        if call is None:
            return
        if num_bytes == 0:
            self._reset(stream_id, http2.PROTOCOL_ERROR)
            self.reset(stream_id)
            return
        call.window.grant(num_bytes)
        self._use_window(call)

    def grant_all(self) -> None:
        """The connection's window has been made larger."""
        self._answers.go_on_with_all()
        if self._upstream is not None:
            self._upstream.grant_all()

    def settings_changed(self, initial_window_change: int) -> None:
        """Tell the server what the client takes of an answer from now on.

        Raises:
            ConnectionFaultError: a window is too large; nothing has been sent then.
        """
        calls = [*self._open.values()]
        for call in calls:
            call.window.change(initial_window_change)
            call.window.server += initial_window_change
        if self._upstream is not None:
            self._upstream.settings_changed(initial_window_change)
        for call in calls:
            self._use_window(call)

    def look(self, now_s: float) -> None:
        """End the calls whose client takes too long; called every second or so."""
        for stream_id in [*self._refused]:
            self._tell_refusal(stream_id, has_client_ended=False)
        for call in [*self._open.values()]:
            call.note_parts(now_s)
            if call.is_stream and now_s - call.opened_s > call.head.timeout_s:
                self._end(call, Status.DEADLINE_EXCEEDED, "the client's deadline has passed")
            elif call.window.waited_s(now_s) > self._limits.slow_reader_s:
                self._end_unread(call, f"the client has read nothing for {self._limits.slow_reader_s:g} s")
            elif call.num_taken >= _TAKEN_BYTES or call.request.is_ready:
                # The client has to wait for the server, which takes no more, or for its turn.
                call.restart_clock(now_s)
            elif call.waits_since_s is not None and now_s - call.waits_since_s > self._limits.body_s:
                text = f"the message did not come within {self._limits.body_s:g} s"
                self._refuse(call, GRPCRefusedError(Status.DEADLINE_EXCEEDED, text))
        self.flush()

    def quiet_calls(self, now_s: float) -> Iterator[Call]:
        """Yield the calls that are quiet for longer than they may be when room is short."""
        for call in self._open.values():
            may_last_s = call.quiet_s(self._limits)
            if may_last_s is not None and now_s - call.quiet_since_s > may_last_s:
                yield call

    def end_quiet(self, call: Call) -> None:
        """End a call to make room."""
        self._door.num_refused += 1
        text = "the gate has hardly room for further calls, and this one brings nothing"
        self._end(call, Status.RESOURCE_EXHAUSTED, text)
        self.flush()

    def flush(self) -> None:
        """Send what has been written for the server."""
        if self._upstream is not None:
            self._upstream.flush()

    def pause(self) -> None:
        """The client does not read as fast as answers come."""
        self._is_paused = True
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        """The client reads again."""
        self._is_paused = False
        if self._upstream is not None:
            self._upstream.resume()

    def close(self) -> None:
        """The client is gone: all its calls end."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.leave()
        for call in [*self._open.values()]:
            self.forget(call)

    def end_all(self, message: str) -> None:
        """End every call with UNAVAILABLE."""
        for call in [*self._open.values()]:
            self._end(call, Status.UNAVAILABLE, message)

    def error_sent(self, call: Call) -> None:
        """See `grpc_answers.Calls`."""
        self._advance(call)

    def note_kept(self, call: Call) -> None:
        """See `grpc_answers.Calls`."""
        if call.id not in self._open:
            return
        if call.num_kept > _MAX_KEPT_BYTES:
            self._end_unread(call, f"the client does not read: {call.num_kept} bytes wait for it")
        elif not self._hold(call):
            self._refuse(call, GRPCRefusedError(Status.RESOURCE_EXHAUSTED, _NO_ROOM))

    def has_sent(self, call: Call) -> None:
        """See `grpc_upstream.Calls`."""
        self._hold(call)
        if self._requests.goes_on(call):
            self._requests.postpone(call)
            return
        may_send = not (call.has_client_ended or call.has_server_ended or call.error)
        if may_send and call.num_taken >= _TAKEN_BYTES and len(call.unsent) <= MAX_WAITING_BYTES:
            call.receive_window += call.num_taken
            self._peer.write(http2.window_update(call.id, call.num_taken))
            call.num_taken = 0

    def answer_ended(self, call: Call) -> None:
        """See `grpc_answers.Calls`."""
        if not call.has_client_ended:
            self._peer.write(http2.rst_stream(call.id, http2.NO_ERROR))
        self.forget(call)

    def left_call_over(self) -> None:
        """See `grpc_upstream.Calls`."""
        self._door.call_ended()
        self.start_waiting()

    def server_leaves(self) -> None:
        """See `grpc_upstream.Calls`."""
        self._has_server_left = True
        self._peer.leave()
        for call in [*self._waiting.values()]:
            self._peer.write(http2.rst_stream(call.id, http2.REFUSED_STREAM))
            self.forget(call)

    def upstream_made(self, upstream: GRPCUpstream) -> None:
        """See `grpc_upstream.Calls`."""
        if self._is_closed:
            upstream.leave()
            return
        self._upstream = upstream
        if self._is_paused:
            upstream.pause()
        self.start_waiting()

    def start_waiting(self) -> None:
        """See `grpc_upstream.Calls`."""
        upstream = self._upstream
        if upstream is None or self._has_server_left or self._is_closed:
            return
        while self._waiting and upstream.has_room:
            upstream.open(self._waiting.pop(next(iter(self._waiting))))

    def upstream_lost(self, upstream: GRPCUpstream) -> None:
        """See `grpc_upstream.Calls`."""
        if upstream is self._upstream:
            self._upstream = None
            self._end_without_server()

    def forget(self, call: Call) -> None:
        """See `grpc_upstream.Calls`."""
        if self._open.pop(call.id, None) is None:
            return
        self._waiting.pop(call.id, None)
        self._requests.drop(call)
        self._answers.drop(call)
        self._door.hold(-call.num_held, -call.num_held_inflated)
        if not call.is_left:
            self._door.call_ended()
        if self._upstream is not None:
            self._upstream.regulate()
        self.start_waiting()
        if not self._open:
            self._peer.calls_ended()

    def _use_window(self, call: Call) -> None:
        if call.error or call.kept:
            self._answers.go_on(call)
        if self._upstream is not None:
            self._upstream.grant(call)

    def _go_on(self, call: Call) -> None:
        """Take what waited for another turn of the loop."""
        self._advance(call)
        self.flush()
        self._peer.flush()

    def _advance(self, call: Call) -> None:
        """Take from what has come of a request as much as can be taken now."""
        if call.id not in self._open:
            return
        try:
            self._requests.take(call, self._loop.time())
            if not self._hold(call):
                raise GRPCRefusedError(Status.RESOURCE_EXHAUSTED, _NO_ROOM)
        except GRPCRefusedError as refusal:
            self._refuse(call, refusal)
            return
        if call.has_request_ended and not call.upstream_id and call.id not in self._waiting:
            self._start(call)
        elif call.upstream_id and self._upstream is not None:
            self._upstream.send(call)
        else:
            self.has_sent(call)

    def _hold(self, call: Call) -> bool:
        num_bytes, num_inflated = call.num_bytes, call.num_inflated
        if not self._door.hold(num_bytes - call.num_held, num_inflated - call.num_held_inflated):
            return False
        call.num_held, call.num_held_inflated = num_bytes, num_inflated
        return True

    def _start(self, call: Call) -> None:
        """Open a call at the server, now or when there is a connection with room for it."""
        if self._has_server_left:
            self._peer.write(http2.rst_stream(call.id, http2.REFUSED_STREAM))
            self.forget(call)
            return
        self._waiting[call.id] = call
        if self._upstream is None and self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
        self.start_waiting()

    async def _connect(self) -> None:
        def make() -> GRPCUpstream:
            return GRPCUpstream(self._peer, self, self._answers, self._door.server_address)

        with contextlib.suppress(OSError):
            await self._loop.create_connection(make, *self._door.server)
        self._connecting = None
        if self._upstream is None:
            self._end_without_server()

    def _end_without_server(self) -> None:
        """End the calls whose answers do not come any more."""
        for call in [*self._open.values()]:
            if call.id in self._waiting or (call.upstream_id and not call.has_server_ended):
                self._end(call, Status.UNAVAILABLE, _AWAY)
        self._peer.flush()

    def _end_unread(self, call: Call, text: str) -> None:
        self._door.num_slow_readers += 1
        self._end(call, Status.CANCELLED, text)

    def _refuse(self, call: Call, refusal: GRPCRefusedError) -> None:
        self._door.num_refused += 1
        self._peer.note_fruitless()
        self._end(call, refusal.grpc_status, str(refusal))

    def _tell_refusal(self, stream_id: int, *, has_client_ended: bool) -> None:
        refusal = self._refused.pop(stream_id, None)
        if refusal is not None:
            text = str(refusal)
            self._write_end(
                stream_id, refusal.grpc_status, text, has_head=False, has_client_ended=has_client_ended
            )

    def _reset(self, stream_id: int, code: int) -> None:
        self._peer.note_fruitless()
        self._peer.write(http2.rst_stream(stream_id, code))

    def _end(self, call: Call, status: Status, message: str) -> None:
        """End a call on both sides."""
        if self._upstream is not None:
            self._upstream.cancel(call)
        self._write_end(
            call.id,
            status,
            message,
            has_head=call.has_answer_head,
            has_client_ended=call.has_client_ended,
        )
        self.forget(call)

    def _write_end(
        self, stream_id: int, status: Status, message: str, *, has_head: bool, has_client_ended: bool
    ) -> None:
        fields = trailers(status, message)
        block = encode(fields if has_head else ANSWER_HEAD + fields)
        self._peer.write(http2.header_frames(stream_id, block, ends=True))
        if not has_client_ended:
            self._peer.write(http2.rst_stream(stream_id, http2.NO_ERROR))
