"""The answers of one client's calls: what the client does not take yet waits, each call's apart."""

from __future__ import annotations

from typing import Protocol

from naiad.gate import http2_frames as http2
from naiad.gate.answer_window import AnswerWindow
from naiad.gate.grpc_call import Call
from naiad.gate.grpc_status import ANSWER_HEAD, Status, trailers
from naiad.gate.header_blocks import NO_TABLE, BlockDecoder, Fields, encode
from naiad.gate.http2_frames import ConnectionFaultError, Frame

# Not in the trailers behind a head that the gate has sent.
_OF_A_HEAD = (b":status", b"content-type", b"grpc-accept-encoding", b"grpc-encoding")


class Client(Protocol):
    """Who gets the answers."""

    window: AnswerWindow

    def write(self, data: bytes | bytearray) -> None:
        """Send what the gate itself says, with the next `flush`."""

    def pass_on(self, data: bytes | bytearray) -> None:
        """Send a part of answers, with the next `flush`."""


class Calls(Protocol):
    """The client's calls."""

    def error_sent(self, call: Call) -> None:
        """The error that waited in a call is gone."""

    def note_kept(self, call: Call) -> None:
        """More or less of a call's answer waits than before."""

    def answer_ended(self, call: Call) -> None:
        """The client has got all of an answer."""

    def forget(self, call: Call) -> None:
        """A call is over, and its client knows."""


class Answers:
    """Passes on what the server says of a call, in its order, and puts errors of the gate between messages.

    An error goes out as soon as a message is complete, and before anything else of its call. What the windows
    of the client have no room for goes out piece by piece.
    """

    def __init__(self, client: Client, calls: Calls) -> None:
        """Set up for this client."""
        self._client = client
        self._calls = calls
        self._waiting: dict[int, Call] = {}

    @property
    def is_full(self) -> bool:
        """Whether something waits because the client takes nothing of any answer."""
        return self._client.window.client <= 0 and bool(self._waiting)

    def take(self, call: Call, each: Frame) -> None:
        """Pass a frame of an answer on, or keep it.

        Args:
            call: the call.
            each: DATA without padding, HEADERS with a whole block, or RST_STREAM.
        """
        call.keep(each)
        self.go_on(call)

    def put_error(self, call: Call, error: bytes) -> None:
        """Send an error in a stream, as much of it as there is room for now; see `Call.error`."""
        call.error += error
        self._send_error(call)
        self._note(call)

    def go_on(self, call: Call) -> None:
        """Send what waits of a call as far as the client takes it."""
        is_sent = True
        while is_sent and (call.error or call.kept):
            if call.error and call.boundary.is_here:
                is_sent = self._send_error(call)
                if is_sent:
                    self._calls.error_sent(call)
            else:
                is_sent = self._pass_next(call)
        self._note(call)
        self._calls.note_kept(call)

    def go_on_with_all(self) -> None:
        """Send what waits of all calls, those first that have waited longest."""
        for call in [*self._waiting.values()]:
            self.go_on(call)

    def drop(self, call: Call) -> None:
        """A call is over: what waits of it is not sent."""
        call.drop_kept()
        call.error.clear()
        self._waiting.pop(call.id, None)

    def _note(self, call: Call) -> None:
        if call.error or call.kept:
            self._waiting[call.id] = call
        else:
            self._waiting.pop(call.id, None)

    def _room(self, call: Call, size: int) -> int:
        """Return how much of so many bytes the client takes."""
        return max(0, min(size, call.window.client, self._client.window.client))

    def _send_error(self, call: Call) -> bool:
        """Send of the error what there is room for; return whether all of it is gone."""
        size = self._room(call, len(call.error)) if call.boundary.is_here else 0
        if size:
            if not call.has_answer_head:
                call.has_answer_head = True
                self._client.write(http2.header_frames(call.id, encode(ANSWER_HEAD), ends=False))
            self._client.write(http2.data_frames(call.id, bytes(call.error[:size])))
            self._count(call, size)
            del call.error[:size]
        return not call.error

    def _pass_next(self, call: Call) -> bool:
        """Pass on the next frame that is kept, or a part of it; return whether all of it is gone."""
        if not call.kept:
            return False
        each = call.take_kept()
        if each.kind == http2.DATA:
            return self._pass_data(call, each)
        if each.kind == http2.RST_STREAM:
            self._client.write(http2.frame(http2.RST_STREAM, 0, call.id, each.payload))
            self._calls.forget(call)
        else:
            self._pass_block(call, each)
        return True

    def _pass_data(self, call: Call, each: Frame) -> bool:
        size = self._room(call, len(each.payload))
        part, rest = each.payload[:size], each.payload[size:]
        if part:
            self._client.pass_on(http2.frame(http2.DATA, 0, call.id, part))
            self._count(call, size)
            if call.is_stream:
                call.num_parts += 1
                call.boundary.follow(part, 0, size)
        ends = bool(each.flags & http2.END_STREAM)
        if rest or (ends and part and call.error):
            call.keep_first(each._replace(payload=rest))
            return not rest
        if ends:
            self._client.pass_on(http2.frame(http2.DATA, http2.END_STREAM, call.id))
            self._calls.answer_ended(call)
        return True

    def _pass_block(self, call: Call, each: Frame) -> None:
        encoded, ends = each.payload, bool(each.flags & http2.END_STREAM)
        is_first, call.has_server_answered = not call.has_server_answered, True
        if is_first and call.has_answer_head:
            if not ends:
                return
            encoded = encode(_trailers(encoded))
        elif not encoded.startswith(NO_TABLE):
            encoded = NO_TABLE + encoded
        call.has_answer_head = True
        self._client.pass_on(http2.header_frames(call.id, encoded, ends=ends))
        if ends:
            self._calls.answer_ended(call)

    def _count(self, call: Call, num_sent: int) -> None:
        call.window.client -= num_sent
        self._client.window.client -= num_sent


def _trailers(encoded: bytes) -> Fields:
    """Return what a head that ends an answer says as trailers."""
    try:
        fields = BlockDecoder().decode(encoded)
    except ConnectionFaultError:
        return trailers(Status.INTERNAL, "the server's last fields are malformed")
    return tuple((name, value) for name, value in fields if name not in _OF_A_HEAD)
