"""A connection to the server's gRPC port, for the calls of one client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from naiad.gate import grpc_answers
from naiad.gate import http2_frames as http2
from naiad.gate.grpc_answers import Answers
from naiad.gate.grpc_call import Call
from naiad.gate.grpc_left_calls import LeftCalls
from naiad.gate.header_blocks import Block, begun, encode
from naiad.gate.http2_frames import ConnectionFaultError, Frame

# What has been read is copied before the next connection reads, so one buffer is enough.
_buffer = memoryview(bytearray(64 * 1024))
_ID_OFFSET = 5


class Client(grpc_answers.Client, Protocol):
    """Who gets the answers."""

    @property
    def settings(self) -> Mapping[int, int]:
        """The client's settings that the server gets as well."""

    @property
    def initial_window(self) -> int:
        """What the client takes of each answer at first."""

    def flush(self) -> None:
        """Send what has been written and passed on."""

    def pause(self) -> None:
        """Take nothing more from the client until `resume`."""

    def resume(self) -> None:
        """Take what the client sends."""


class Calls(Protocol):
    """The client's calls."""

    def has_sent(self, call: Call) -> None:
        """More of a call's request has reached the server."""

    def forget(self, call: Call) -> None:
        """A call is over, and its client knows."""

    def left_call_over(self) -> None:
        """A call that its client has left is over at the server."""

    def server_leaves(self) -> None:
        """The server takes no more calls by this connection."""

    def upstream_made(self, upstream: GRPCUpstream) -> None:
        """The connection stands."""

    def start_waiting(self) -> None:
        """There may be room for more calls."""

    def upstream_lost(self, upstream: GRPCUpstream) -> None:
        """The connection has ended."""


class GRPCUpstream(asyncio.BufferedProtocol):
    """Passes frames of answers on as they come, under the number of the client's stream.

    The server is told to use no table for its headers, so that each block of them stands for itself.
    """

    def __init__(self, client: Client, calls: Calls, answers: Answers, authority: str) -> None:
        """Set up for this client; `authority` is HOST:PORT of the server."""
        self._client = client
        self._calls = calls
        self._answers = answers
        self._authority = authority
        self._transport: Any = None
        self._unread = bytearray()
        self._unsent: list[bytes] = []
        self._open: dict[int, Call] = {}
        self._left = LeftCalls(client.window, self._write_now, lambda: self._may_read, calls.left_call_over)
        self._has_client_left = False
        self._next_id = 1
        self._window = self._initial_window = http2.DEFAULT_WINDOW
        self._max_streams = http2.MAX_WINDOW
        self._block: Block | None = None
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server has taken the connection."""
        self._transport = transport
        first = {http2.HEADER_TABLE_SIZE: 0, http2.ENABLE_PUSH: 0, **self._client.settings}
        self.write(http2.PREFACE + http2.settings(first))
        self._client.window.server = http2.DEFAULT_WINDOW
        self.grant_all()
        self._calls.upstream_made(self)
        self.flush()
        if self._is_paused:
            # uvloop begins to read when this has returned.
            asyncio.get_running_loop().call_soon(self._pause_again)

    @property
    def is_open(self) -> bool:
        """Whether the server is there."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_left(self) -> int:
        """Calls that the client has left and the server has not ended."""
        return len(self._left)

    def settings_changed(self, initial_window_change: int) -> None:
        """Tell the server what the client takes of answers from now on."""
        self.write(http2.settings(self._client.settings))
        self.flush()
        self._left.settings_changed(initial_window_change)

    @property
    def has_room(self) -> bool:
        """Whether the server takes one more call now."""
        return len(self._open) + len(self._left) < self._max_streams

    def _has_open(self, call: Call) -> bool:
        """Whether the call is open on this connection: one of an earlier connection may have its number."""
        return self._open.get(call.upstream_id) is call

    def write(self, data: bytes) -> None:
        """Send this to the server, with the next `flush`."""
        self._unsent.append(data)

    def _write_now(self, data: bytes) -> None:
        self.write(data)
        self.flush()
        self._close_after_client()

    def flush(self) -> None:
        """Send what has been written."""
        if self._unsent and self.is_open:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def open(self, call: Call) -> None:
        """Begin a call."""
        call.upstream_id = self._next_id
        self._next_id += 2
        self._open[call.upstream_id] = call
        call.send_window = self._initial_window
        call.window.server = self._client.initial_window
        block = encode(call.head.fields(self._authority))
        self.write(http2.header_frames(call.upstream_id, block, ends=False))
        self.grant(call)
        self.send(call)

    def send(self, call: Call) -> None:
        """Send of a call's request what the server takes now."""
        if not self._has_open(call):
            return
        unsent = call.unsent
        while unsent:
            size = min(len(unsent), self._window, call.send_window, http2.MAX_FRAME_BYTES)
            if size <= 0:
                break
            part = bytes(unsent[:size])
            del unsent[:size]
            self._window -= size
            call.send_window -= size
            call.has_sent_all = call.has_request_ended and not unsent
            flags = http2.END_STREAM if call.has_sent_all else 0
            self.write(http2.frame(http2.DATA, flags, call.upstream_id, part))
        if call.has_request_ended and not unsent and not call.has_sent_all:
            call.has_sent_all = True
            self.write(http2.frame(http2.DATA, http2.END_STREAM, call.upstream_id))
        self._calls.has_sent(call)

    def grant(self, call: Call) -> None:
        """Tell the server what else the client takes of a call's answer."""
        if self._has_open(call) and (owed := call.window.take_owed(call.num_kept)):
            self.write(http2.window_update(call.upstream_id, owed))
        self.regulate()

    def grant_all(self) -> None:
        """Tell the server what else the client takes of all answers together."""
        if owed := self._client.window.take_owed():
            self.write(http2.window_update(0, owed))
        self.regulate()

    def cancel(self, call: Call) -> None:
        """End a call; what still comes of it is dropped."""
        if not self._has_open(call):
            return
        del self._open[call.upstream_id]
        if call.is_stream and call.has_asked:
            self._left.add(call)
        else:
            self.write(http2.rst_stream(call.upstream_id, http2.CANCEL))

    def regulate(self) -> None:
        """Read from the server while its answers go anywhere."""
        if not self._may_read:
            self._transport.pause_reading()
        elif self.is_open:
            self._transport.resume_reading()

    @property
    def _may_read(self) -> bool:
        return self._has_client_left or not (self._is_paused or self._answers.is_full)

    def pause(self) -> None:
        """Read no more until `resume`."""
        self._is_paused = True
        self.regulate()

    def _pause_again(self) -> None:
        if self._is_paused and self.is_open:
            self.regulate()

    def resume(self) -> None:
        """Read again."""
        self._is_paused = False
        self.regulate()

    def leave(self) -> None:
        """The client is gone: end its calls, and close as soon as they are over."""
        self._has_client_left = True
        for call in [*self._open.values()]:
            self.cancel(call)
        self.resume()
        self.flush()
        self._close_after_client()

    def _close_after_client(self) -> None:
        if self._has_client_left and not self._left and self.is_open:
            self._transport.close()

    def pause_writing(self) -> None:
        """The server does not take what the client sends."""
        if not self._has_client_left:
            self._client.pause()

    def resume_writing(self) -> None:
        """The server takes more."""
        if not self._has_client_left:
            self._client.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next part is read to."""
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass the next part on."""
        self._unread += _buffer[:nbytes]
        self._walk()
        self.regulate()
        self._client.flush()
        self.flush()
        self._close_after_client()

    def eof_received(self) -> None:
        """The server has closed the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._unsent.clear()
        self._left.end_all()
        if not self._has_client_left:
            self._client.resume()
        self._calls.upstream_lost(self)

    def _walk(self) -> None:
        """Go through the frames that have come; answers' are passed on, several at once where they follow."""
        data, unpack, head_size = self._unread, http2.HEAD.unpack_from, http2.HEAD.size
        at = begin = 0
        while len(data) - at >= head_size:
            high, low, kind, flags, stream_id = unpack(data, at)
            size = high << 8 | low
            end = at + head_size + size
            if size > http2.MAX_FRAME_BYTES:
                self._transport.abort()
                return
            if end > len(data):
                break
            if kind == http2.DATA and not flags and self._can_pass(stream_id, size, data, at):
                at = end
                continue
            if at > begin:
                self._client.pass_on(data[begin:at])
            begin = at = end
            if not self._take(Frame(kind, flags, stream_id, bytes(data[end - size : end]))):
                return
        if begin == 0 and at == len(data):
            passed, self._unread = data, bytearray()
        else:
            passed = data[begin:at]
            del data[:at]
        if passed:
            self._client.pass_on(passed)

    def _can_pass(self, stream_id: int, size: int, data: bytearray, at: int) -> bool:
        """Count a frame of an answer and give it its client's number; False: it needs a closer look."""
        call, window = self._open.get(stream_id), self._client.window
        if call is None or call.error or call.kept or size > window.client or size > call.window.client:
            return False
        http2.WORD.pack_into(data, at + _ID_OFFSET, call.id)
        call.window.client -= size
        call.window.server -= size
        window.client -= size
        window.server -= size
        if call.is_stream:
            at += http2.HEAD.size
            call.num_parts += 1
            call.boundary.follow(data, at, at + size)
        return True

    def _take(self, each: Frame) -> bool:
        """Take a frame that is not simply passed on; False: nothing behind it can be taken."""
        take = _TAKERS.get(each.kind)
        try:
            if take is not None:
                take(self, each)
        except ConnectionFaultError:
            # What the server says is no HTTP/2, so nothing else that it says can be believed.
            self._transport.abort()
        return self.is_open

    def _take_data(self, each: Frame) -> None:
        call, window = self._open.get(each.stream_id), self._client.window
        window.server -= len(each.payload)
        if call is None:
            self._left.take(each)
        else:
            call.window.server -= len(each.payload)
            payload = http2.content(each)
            ends = each.flags & http2.END_STREAM
            if ends:
                self._end(call)
            self._answers.take(call, Frame(http2.DATA, ends, call.id, payload))
            self.grant(call)
        # Padding, what is kept, and what comes of a call that has ended use nothing of the client's window.
        self.grant_all()

    def _take_rst_stream(self, each: Frame) -> None:
        http2.read_word(each)
        call = self._open.get(each.stream_id)
        self._left.end(each.stream_id)
        if call is not None:
            call.has_sent_all = True
            self._end(call)
            self._answers.take(call, each)

    def _take_ping(self, each: Frame) -> None:
        if not each.flags & http2.ACK:
            self.write(http2.frame(http2.PING, http2.ACK, 0, each.payload))

    def _refuse_push(self, each: Frame) -> None:
        raise ConnectionFaultError(http2.PROTOCOL_ERROR, "a push, which the gate has turned off")

    def _take_headers(self, each: Frame) -> None:
        if self._block is None:
            self._block = begun(each)
        else:
            self._block.add(each)
        if self._block.is_complete:
            block, self._block = self._block, None
            call = self._open.get(block.stream_id)
            if block.ends_stream:
                self._left.end(block.stream_id)
            if call is not None:
                if block.ends_stream:
                    self._end(call)
                flags = http2.END_STREAM if block.ends_stream else 0
                self._answers.take(call, Frame(http2.HEADERS, flags, call.id, block.encoded))

    def _end(self, call: Call) -> None:
        """The server has said everything of a call."""
        del self._open[call.upstream_id]
        call.has_server_ended = True
        call.unsent.clear()
        if not call.has_sent_all:
            self.write(http2.rst_stream(call.upstream_id, http2.CANCEL))

    def _take_settings(self, each: Frame) -> None:
        if each.flags & http2.ACK:
            return
        values = http2.read_settings(each.payload)
        self._max_streams = values.get(http2.MAX_CONCURRENT_STREAMS, self._max_streams)
        initial = values.get(http2.INITIAL_WINDOW_SIZE, self._initial_window)
        change, self._initial_window = initial - self._initial_window, initial
        self.write(http2.frame(http2.SETTINGS, http2.ACK, 0))
        for call in [*self._open.values()]:
            call.send_window += change
            self.send(call)
        self._calls.start_waiting()

    def _take_window_update(self, each: Frame) -> None:
        num_bytes = http2.read_word(each)
        if each.stream_id == 0:
            self._window += num_bytes
            for waiting in [call for call in self._open.values() if call.unsent]:
                self.send(waiting)
            return
        call = self._open.get(each.stream_id)
        if call is not None:
            call.send_window += num_bytes
            self.send(call)

    def _take_goaway(self, each: Frame) -> None:
        if len(each.payload) < 8:
            raise ConnectionFaultError(http2.FRAME_SIZE_ERROR, "GOAWAY is cut off")
        last = http2.WORD.unpack_from(each.payload)[0]
        self._calls.server_leaves()
        for upstream_id, call in [*self._open.items()]:
            if upstream_id > last:
                # It has not seen them, so that clients may try again.
                del self._open[upstream_id]
                self._client.write(http2.rst_stream(call.id, http2.REFUSED_STREAM))
                self._calls.forget(call)


# What is not here says nothing to a client.
_TAKERS: Mapping[int, Callable[[GRPCUpstream, Frame], None]] = {
    http2.DATA: GRPCUpstream._take_data,
    http2.HEADERS: GRPCUpstream._take_headers,
    http2.RST_STREAM: GRPCUpstream._take_rst_stream,
    http2.SETTINGS: GRPCUpstream._take_settings,
    http2.PUSH_PROMISE: GRPCUpstream._refuse_push,
    http2.PING: GRPCUpstream._take_ping,
    http2.GOAWAY: GRPCUpstream._take_goaway,
    http2.WINDOW_UPDATE: GRPCUpstream._take_window_update,
    http2.CONTINUATION: GRPCUpstream._take_headers,
}
