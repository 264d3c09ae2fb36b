"""The requests of one client's calls: their messages are inflated, checked, and made ready for the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from naiad.gate.grpc_answers import Answers
from naiad.gate.grpc_call import Call
from naiad.gate.grpc_framing import Message, framed
from naiad.gate.grpc_messages import check_infer_request, error_in_stream
from naiad.gate.grpc_status import GRPCRefusedError, Status
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError
from naiad.gate.turns import Turns

# While more than that waits for the server, no further message of a call is looked at.
MAX_WAITING_BYTES = 64 << 10


class Door(Protocol):
    """The port that requests come through."""

    limits: Limits
    turns: Turns
    num_refused: int


class Requests:
    """Takes the messages of all calls one by one; when a turn of the loop has had enough, the rest waits."""

    def __init__(self, door: Door, answers: Answers, advance: Callable[[Call], None]) -> None:
        """Set up; `advance` takes what waits of a call, and sends it."""
        self._door = door
        self._limits = door.limits
        self._answers = answers
        self._advance = advance
        self._postponed: dict[int, Call] = {}

    def take(self, call: Call, now_s: float) -> None:
        """Take from what has come of a request as much as can be taken now.

        Raises:
            GRPCRefusedError: the call has to end.
        """
        if call.has_server_ended:
            return
        while not call.error and call.request.is_ready:
            if call.is_stream and len(call.unsent) > MAX_WAITING_BYTES:
                return
            if self._door.turns.is_over:
                self.postpone(call)
                return
            self._take_message(call, now_s)
        if not call.has_client_ended or call.error or call.has_request_ended:
            return
        call.request.check_end()
        if not call.is_stream:
            if self._door.turns.is_over:
                self.postpone(call)
                return
            self._pass_only_message(call)
        call.has_request_ended = True

    def goes_on(self, call: Call) -> bool:
        """Whether a message of a call waits only until the server has taken the one before."""
        is_open = not call.error and not call.has_server_ended
        return is_open and call.request.is_ready and len(call.unsent) <= MAX_WAITING_BYTES

    def postpone(self, call: Call) -> None:
        """Go on with a call in another turn."""
        self._postponed[call.id] = call
        self._door.turns.postpone(self)

    def drop(self, call: Call) -> None:
        """A call is over."""
        self._postponed.pop(call.id, None)
        if not self._postponed:
            self._door.turns.forget(self)

    def go_on(self) -> None:
        """See `turns.Worker`."""
        if self._postponed:
            self._advance(self._postponed.pop(next(iter(self._postponed))))
        if self._postponed:
            self._door.turns.postpone(self)

    def _take_message(self, call: Call, now_s: float) -> None:
        message = call.request.next()
        if message is None:
            return
        if call.is_stream:
            self._pass_message(call, message, now_s)
        elif call.message is None:
            # It stays as it came until the request has ended: a client may hold it back for long.
            call.message = message
        else:
            raise GRPCRefusedError(Status.UNIMPLEMENTED, "expected one message, got more")

    def _pass_message(self, call: Call, message: Message, now_s: float) -> None:
        """Take a message of a stream: one that does not pass is refused, and the others go on."""
        content = self._content(call, message)
        try:
            check_infer_request(content, self._limits)
        except RefusedError as refusal:
            self._door.num_refused += 1
            self._answers.put_error(call, framed(error_in_stream(content, str(refusal))))
        else:
            self._put(call, message, content)
            call.note_message(now_s)

    def _pass_only_message(self, call: Call) -> None:
        message, call.message = call.message, None
        if message is None:
            raise GRPCRefusedError(Status.UNIMPLEMENTED, "expected one message, got none")
        content = self._content(call, message)
        if call.head.kind == "infer":
            try:
                check_infer_request(content, self._limits)
            except RefusedError as refusal:
                raise GRPCRefusedError(Status.INVALID_ARGUMENT, str(refusal)) from None
        self._put(call, message, content)

    def _content(self, call: Call, message: Message) -> bytes:
        """Return what a message says, and count its cost: that of the largest if it is compressed."""
        size = self._limits.max_body_bytes if message.is_compressed else len(message.content)
        self._door.turns.spend(size)
        return call.request.inflated(message)

    def _put(self, call: Call, message: Message, content: bytes) -> None:
        call.has_inflated = message.is_compressed or (call.has_inflated and bool(call.unsent))
        call.unsent += framed(content)
