"""One client's gRPC connection: its frames are taken apart, and nothing of them is copied to the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

from naiad.gate import grpc_calls
from naiad.gate import http2_frames as http2
from naiad.gate.answer_window import READING_BYTES, AnswerWindow
from naiad.gate.grpc_call import REQUEST_WINDOW, Call
from naiad.gate.grpc_calls import MAX_CALLS, Calls
from naiad.gate.grpc_head import MAX_METADATA_BYTES
from naiad.gate.header_blocks import Block, BlockDecoder, begun
from naiad.gate.http2_frames import ConnectionFaultError, Frame

# hello: the client's settings have not come; draining: it is told to go; closed: the rest is being sent.
State = Literal["hello", "open", "draining", "closed"]

# What a client may send of all its calls before it is told to go on; it is told when half has been taken.
_RECEIVE_WINDOW = 1 << 20
_SETTINGS = {
    http2.MAX_CONCURRENT_STREAMS: MAX_CALLS,
    http2.INITIAL_WINDOW_SIZE: REQUEST_WINDOW,
    http2.MAX_HEADER_LIST_SIZE: MAX_METADATA_BYTES,
}
# Those of the client's settings that speak of answers.
_SENT_ON = (http2.INITIAL_WINDOW_SIZE, http2.MAX_HEADER_LIST_SIZE)
# A client that stops to read is noticed when these are full.
_WRITE_BUFFER_BYTES = 64 * 1024
_SEND_BUFFER_BYTES = 128 * 1024
# What the gate itself has said and a client has not read.
_MAX_UNREAD_BYTES = 1 << 20
# Frames that ask for nothing, in a second. With each part of an answer some more are excused, because clients
# acknowledge it: two, and one for so many bytes.
_MAX_IDLE_FRAMES = 2000
_IDLE_FRAMES_OF_A_PART, _BYTES_OF_AN_IDLE_FRAME = 2, 16
# Settings that change something concern each call.
_IDLE_FRAMES_OF_SETTINGS = 20
# Calls that are opened to be refused or cancelled at once: in a second.
_MAX_FRUITLESS = 1000
_IDLE_S = 300.0
# What is left when a connection closes: a client that takes less of it in so many seconds is gone.
_LAST_S, _LAST_READ_BYTES = 5.0, 16 << 10
_MAX_DRAINED_BYTES = 16 << 20


class Door(grpc_calls.Door, Protocol):
    """The port that connections come through; see `GRPCDoor`."""

    def admit(self, connection: GRPCConnection) -> bool:
        """Take a new connection, if there is room."""

    def forget(self, connection: GRPCConnection) -> None:
        """A connection has ended."""


class GRPCConnection(asyncio.Protocol):
    """The connection; it belongs to the door that it came through.

    Attributes:
        window: what the client takes of all answers together.
        settings: the client's settings that the server gets as well.
    """

    def __init__(self, door: Door) -> None:
        """Set up."""
        self.window = AnswerWindow(http2.DEFAULT_WINDOW, http2.DEFAULT_WINDOW)
        self.settings: dict[int, int] = {}
        self._door = door
        self._limits = door.limits
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._unsent: list[bytes | bytearray] = []
        self._reader = http2.FrameReader()
        self._decoder = BlockDecoder()
        self._block: Block | None = None
        self._calls = Calls(door, self)
        self._last_id = 0
        self._receive_window = _RECEIVE_WINDOW
        self._num_taken = 0
        self._num_idle_frames = self._num_fruitless = self._num_drained_bytes = 0
        # Whether the client does not read, and whether nothing is read from it.
        self._is_paused = self._is_held = False
        self._num_unsent = 0
        self._paused_since_s = 0.0
        self._num_frames = self._num_frames_then = 0
        self._state: State = "hello"
        self._since_s = self._idle_since_s = self._loop.time()

    @property
    def initial_window(self) -> int:
        """What the client takes of each answer at first."""
        return self.settings.get(http2.INITIAL_WINDOW_SIZE, http2.DEFAULT_WINDOW)

    @property
    def has_calls(self) -> bool:
        """Whether a call is under way."""
        return len(self._calls) > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = transport
        if not self._door.admit(self):
            self.close()
            return
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.write(http2.settings(_SETTINGS) + http2.window_update(0, _RECEIVE_WINDOW - http2.DEFAULT_WINDOW))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: its calls end."""
        self._state = "closed"
        self._door.forget(self)
        self._calls.close()

    def eof_received(self) -> bool:
        """The client has closed the connection."""
        if self._state != "draining":
            self._transport.abort()
        return False

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._state in ("draining", "closed"):
            self._num_drained_bytes += len(data)
            if self._num_drained_bytes > _MAX_DRAINED_BYTES:
                self._transport.abort()
            return
        try:
            for each in self._reader.frames(data):
                self._take(each)
            if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                raise ConnectionFaultError(http2.ENHANCE_YOUR_CALM, "the client does not read")
        except ConnectionFaultError as fault:
            self._end_with(fault)
        self._calls.flush()
        self.flush()

    def pause_writing(self) -> None:
        """The client does not read as fast as answers come."""
        self._is_paused = True
        self._note_progress(self._transport.get_write_buffer_size())
        self._calls.pause()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._is_paused = False
        self._calls.resume()

    def write(self, data: bytes | bytearray) -> None:
        """Send this, with the next `flush`."""
        self._unsent.append(data)

    def pass_on(self, data: bytes | bytearray) -> None:
        """Send a part of answers, with the next `flush`."""
        excused = _IDLE_FRAMES_OF_A_PART + len(data) // _BYTES_OF_AN_IDLE_FRAME
        self._num_idle_frames = max(0, self._num_idle_frames - excused)
        self._unsent.append(data)

    def flush(self) -> None:
        """Send what has been written."""
        unsent = self._unsent
        if unsent and self._state in ("hello", "open") and not self._transport.is_closing():
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        unsent.clear()

    def pause(self) -> None:
        """Take nothing more from the client until `resume`."""
        self._is_held = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """Take what the client sends."""
        self._is_held = False
        self._transport.resume_reading()

    def look(self, now_s: float) -> None:
        """End the connection, or calls of it, if the client takes too long; called every second or so."""
        self._num_idle_frames = self._num_fruitless = 0
        waited_s = now_s - self._since_s
        if self._state == "closed":
            self._note_reading(_LAST_READ_BYTES)
            waited_s = now_s - self._paused_since_s
        if self._state in ("draining", "closed"):
            if waited_s > _LAST_S:
                self._transport.abort()
            return
        has_begun = self._state == "hello" or self._block is not None or self._reader.is_within_frame
        if not has_begun or self._is_held or self._num_frames != self._num_frames_then:
            self._since_s, self._num_frames_then = now_s, self._num_frames
        elif waited_s > self._limits.head_s:
            self._transport.abort()
            return
        if self._is_slow(now_s):
            self._door.num_slow_readers += 1
            self._transport.abort()
            return
        self._calls.look(now_s)
        if not self._calls and now_s - self._idle_since_s > _IDLE_S:
            self.leave()
        self.flush()

    def quiet_calls(self, now_s: float) -> Iterator[Call]:
        """Yield the calls that are quiet for longer than they may be when room is short."""
        return self._calls.quiet_calls(now_s)

    def end_quiet(self, call: Call) -> None:
        """End a call to make room."""
        self._calls.end_quiet(call)
        self.flush()

    def leave(self) -> None:
        """Take no new calls, and close when the last one has ended."""
        if self._state in ("hello", "open") and not self._calls.is_leaving:
            self._calls.is_leaving = True
            self.write(http2.goaway(self._last_id, http2.NO_ERROR))
        if not self._calls:
            self.calls_ended()

    def end(self, message: str) -> None:
        """End all calls, and close."""
        self.leave()
        self._calls.end_all(message)
        self.close()

    def calls_ended(self) -> None:
        """The last call is over."""
        self._idle_since_s = self._loop.time()
        if self._calls.is_leaving and self._state in ("hello", "open"):
            self.close()

    def note_fruitless(self) -> None:
        """A call has been opened for nothing; too many of them are refused as a flood with the next frame."""
        self._num_fruitless += 1

    def close(self) -> None:
        """Close when everything is sent."""
        self.flush()
        self._enter("closed")
        self._note_progress(self._transport.get_write_buffer_size())
        self._transport.close()

    def _enter(self, state: State) -> None:
        self._state = state
        self._since_s = self._idle_since_s = self._loop.time()

    def _note_progress(self, num_unsent: int) -> None:
        self._num_unsent, self._paused_since_s = num_unsent, self._loop.time()

    def _note_reading(self, num_bytes: int) -> None:
        """See whether the client has taken so much since its last progress."""
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent <= self._num_unsent - num_bytes:
            self._note_progress(num_unsent)

    def _is_slow(self, now_s: float) -> bool:
        """Whether the client takes nothing, of whichever call."""
        if self._is_paused:
            self._note_reading(READING_BYTES)
            if now_s - self._paused_since_s > self._limits.slow_reader_s:
                return True
        is_full = self.has_calls and self.window.client <= 0
        return self.window.waited_s(now_s, is_used=is_full) > self._limits.slow_reader_s

    def _end_with(self, fault: ConnectionFaultError) -> None:
        """End the connection: what comes behind a fault is not trusted."""
        self._door.num_refused += 1
        self.write(http2.goaway(self._last_id, fault.code, str(fault)))
        self.flush()
        self._enter("draining")
        self._calls.close()
        self._unsent.clear()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _take(self, each: Frame) -> None:
        self._num_frames += 1
        if self._state == "hello":
            if each.kind != http2.SETTINGS or each.flags & http2.ACK:
                raise ConnectionFaultError(http2.PROTOCOL_ERROR, "expected SETTINGS first")
            self._enter("open")
        if self._state != "open":
            return
        if self._block is not None and each.kind != http2.CONTINUATION:
            raise ConnectionFaultError(http2.PROTOCOL_ERROR, "expected CONTINUATION")
        take = _TAKERS.get(each.kind)
        if take is None or take[1]:
            self._note_idle_frames()
        if take is not None:
            take[0](self, each)
        if self._num_fruitless > _MAX_FRUITLESS:
            raise ConnectionFaultError(http2.ENHANCE_YOUR_CALM, "calls that are ended at once")

    def _note_idle_frames(self, num_frames: int = 1) -> None:
        self._num_idle_frames += num_frames
        if self._num_idle_frames > _MAX_IDLE_FRAMES:
            raise ConnectionFaultError(http2.ENHANCE_YOUR_CALM, "frames that ask for nothing")

    def _take_data(self, each: Frame) -> None:
        self._check_known(each)
        data, size = http2.content(each), len(each.payload)
        ends = bool(each.flags & http2.END_STREAM)
        if not data and not ends:
            self._note_idle_frames()
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFaultError(http2.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        self._num_taken += size
        if self._num_taken > _RECEIVE_WINDOW // 2:
            self._receive_window += self._num_taken
            self.write(http2.window_update(0, self._num_taken))
            self._num_taken = 0
        self._calls.take(each.stream_id, data, size, ends=ends)

    def _take_headers(self, each: Frame) -> None:
        if each.stream_id % 2 == 0:
            raise ConnectionFaultError(http2.PROTOCOL_ERROR, f"HEADERS of stream {each.stream_id}")
        if self._block is None:
            if each.kind == http2.HEADERS and each.stream_id <= self._last_id:
                raise ConnectionFaultError(http2.STREAM_CLOSED, "HEADERS of a stream that has some")
            self._block = begun(each)
        else:
            self._block.add(each)
        if self._block.is_complete:
            block, self._block = self._block, None
            fields = self._decoder.decode(block.encoded)
            self._last_id = block.stream_id
            self._calls.begin(block.stream_id, fields, ends=block.ends_stream)

    def _take_rst_stream(self, each: Frame) -> None:
        self._check_known(each)
        http2.read_word(each)
        self._calls.reset(each.stream_id)

    def _take_settings(self, each: Frame) -> None:
        self._check_connection(each)
        if each.flags & http2.ACK:
            if each.payload:
                raise ConnectionFaultError(http2.FRAME_SIZE_ERROR, "an answer to SETTINGS has values")
            return
        values = http2.read_settings(each.payload)
        before = self.initial_window
        changed = {key: values[key] for key in _SENT_ON if key in values}
        self.settings.update(changed)
        if changed:
            self._note_idle_frames(_IDLE_FRAMES_OF_SETTINGS)
            self._calls.settings_changed(self.initial_window - before)
        self.write(http2.frame(http2.SETTINGS, http2.ACK, 0))

    def _take_ping(self, each: Frame) -> None:
        self._check_connection(each)
        if len(each.payload) != 8:
            raise ConnectionFaultError(http2.FRAME_SIZE_ERROR, "PING: expected 8 bytes")
        if not each.flags & http2.ACK:
            self.write(http2.frame(http2.PING, http2.ACK, 0, each.payload))

    def _take_goaway(self, each: Frame) -> None:
        """The client would take no streams of the server's, and there are none."""
        self._check_connection(each)
        if len(each.payload) < 8:
            raise ConnectionFaultError(http2.FRAME_SIZE_ERROR, "GOAWAY: expected at least 8 bytes")

    def _take_window_update(self, each: Frame) -> None:
        num_bytes = http2.read_word(each) & http2.MAX_WINDOW
        if each.stream_id:
            self._check_known(each)
            self._calls.grant(each.stream_id, num_bytes)
            return
        if num_bytes == 0:
            raise ConnectionFaultError(http2.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
        self.window.grant(num_bytes)
        self._calls.grant_all()

    def _take_priority(self, each: Frame) -> None:
        """Priorities say nothing to the gate: parts of answers come in the server's order."""
        if each.stream_id == 0:
            raise ConnectionFaultError(http2.PROTOCOL_ERROR, "PRIORITY of stream 0")
        if len(each.payload) != 5:
            raise ConnectionFaultError(http2.FRAME_SIZE_ERROR, "PRIORITY: expected 5 bytes")

    def _refuse_push(self, each: Frame) -> None:
        raise ConnectionFaultError(http2.PROTOCOL_ERROR, "a client does not push")

    def _check_known(self, each: Frame) -> None:
        """Check that the frame's stream has been opened once."""
        if not 0 < each.stream_id <= self._last_id or each.stream_id % 2 == 0:
            text = f"a frame of type {each.kind} of stream {each.stream_id}, which is not open"
            raise ConnectionFaultError(http2.PROTOCOL_ERROR, text)

    def _check_connection(self, each: Frame) -> None:
        """Check that the frame belongs to no stream."""
        if each.stream_id:
            raise ConnectionFaultError(http2.PROTOCOL_ERROR, f"a frame of type {each.kind} of a stream")


# How a frame is taken, and whether it asks for nothing. Others are ignored, as HTTP/2 wants it.
_TAKERS: Mapping[int, tuple[Callable[[GRPCConnection, Frame], None], bool]] = {
    http2.DATA: (GRPCConnection._take_data, False),
    http2.HEADERS: (GRPCConnection._take_headers, False),
    http2.PRIORITY: (GRPCConnection._take_priority, True),
    http2.RST_STREAM: (GRPCConnection._take_rst_stream, False),
    http2.SETTINGS: (GRPCConnection._take_settings, True),
    http2.PUSH_PROMISE: (GRPCConnection._refuse_push, True),
    http2.PING: (GRPCConnection._take_ping, True),
    http2.GOAWAY: (GRPCConnection._take_goaway, True),
    http2.WINDOW_UPDATE: (GRPCConnection._take_window_update, True),
    http2.CONTINUATION: (GRPCConnection._take_headers, False),
}
