"""Streams whose clients have left before the server has ended them.

Release 24.10 never lets go of a stream that is reset after its first request was refused before a model got
it, nor, rarely, of one that is reset while the last response of its first request is being written. It keeps
the connection, the request and its inputs. It does let go of a stream that it ends itself, once the client
has sent everything. So a stream is half-closed first, and reset only if it goes on: then a request runs that
is to be cancelled. What the server sends meanwhile is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from naiad.gate import http2_frames as http2
from naiad.gate.answer_window import AnswerWindow
from naiad.gate.grpc_call import Call
from naiad.gate.http2_frames import Frame

# Until a stream is reset. One that nothing has come of may be one whose refusal is on its way.
_GRACE_S, _UNANSWERED_GRACE_S = 0.05, 0.5
# What the server may send of such a stream: an error and the end.
ROOM_BYTES = 16 << 10
# How the message of an error begins: with field 1 of ModelStreamInferResponse, which a response leaves out.
_ERROR_BEGINS = 0x0A


class LeftCalls:
    """The streams, by the numbers that they have at the server."""

    def __init__(
        self,
        window: AnswerWindow,
        write: Callable[[bytes], None],
        is_reading: Callable[[], bool],
        note_over: Callable[[], None],
    ) -> None:
        """Set up.

        Args:
            window: what the server may send on the connection.
            write: sends frames to the server, at once.
            is_reading: whether what the server sends is being read.
            note_over: called when one of them is over.
        """
        self._window = window
        self._write = write
        self._is_reading = is_reading
        self._note_over = note_over
        self._calls: dict[int, Call] = {}
        # Those that could not say anything for some time before they were last looked at.
        self._unheard: set[int] = set()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Half-close a stream, and let the server say what it has to say."""
        call.is_left = True
        self._calls[call.upstream_id] = call
        for each in call.kept:
            if each.kind == http2.DATA:
                call.boundary.follow(each.payload, 0, len(each.payload))
        call.drop_request()
        if not call.has_sent_all:
            call.has_sent_all = True
            self._write(http2.frame(http2.DATA, http2.END_STREAM, call.upstream_id))
        self._make_room(call)
        is_answered = call.boundary.first_byte is not None
        self._look_in(_GRACE_S if is_answered else _UNANSWERED_GRACE_S, call.upstream_id)

    def take(self, each: Frame) -> None:
        """Drop a part of an answer, a frame of DATA."""
        call = self._calls.get(each.stream_id)
        if call is None:
            return
        call.window.server -= len(each.payload)
        part = http2.content(each)
        call.boundary.follow(part, 0, len(part))
        if each.flags & http2.END_STREAM:
            self.end(each.stream_id)
        else:
            self._make_room(call)

    def settings_changed(self, initial_window_change: int) -> None:
        """The server has been told of another window for all streams, these among them."""
        for call in self._calls.values():
            call.window.server += initial_window_change
            self._make_room(call)

    def end(self, stream_id: int) -> None:
        """The server has ended a stream."""
        if self._calls.pop(stream_id, None) is not None:
            self._unheard.discard(stream_id)
            self._note_over()

    def end_all(self) -> None:
        """The server is gone."""
        for stream_id in [*self._calls]:
            self.end(stream_id)

    def _make_room(self, call: Call) -> bool:
        """Let the server say something; return whether it could before."""
        had_room = True
        for stream_id, window in ((call.upstream_id, call.window), (0, self._window)):
            if window.server < ROOM_BYTES // 2:
                had_room = False
                self._write(http2.window_update(stream_id, ROOM_BYTES - window.server))
                window.server = ROOM_BYTES
        return had_room

    def _look_in(self, seconds: float, stream_id: int) -> None:
        asyncio.get_running_loop().call_later(seconds, self._look, stream_id)

    def _look(self, stream_id: int) -> None:
        call = self._calls.get(stream_id)
        if call is None or call.boundary.first_byte == _ERROR_BEGINS:
            # The server ends it when the last of its requests has been answered.
            return
        is_heard = self._is_reading() and self._make_room(call)
        if not is_heard:
            self._unheard.add(stream_id)
        if stream_id in self._unheard:
            # It has one more grace from when it is heard.
            if is_heard:
                self._unheard.remove(stream_id)
            self._look_in(_UNANSWERED_GRACE_S, stream_id)
            return
        del self._calls[stream_id]
        self._write(http2.rst_stream(stream_id, http2.CANCEL))
        self._note_over()
