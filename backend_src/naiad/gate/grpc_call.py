"""One gRPC call: what of it has come, what has been sent on, and what its client takes."""

from __future__ import annotations

from collections import deque

from naiad.gate.answer_window import AnswerWindow
from naiad.gate.grpc_framing import Message, MessageBoundary, MessageReader
from naiad.gate.grpc_head import GRPCHead
from naiad.gate.http2_frames import Frame
from naiad.gate.limits import Limits

# What a client may send of a call before it is told to go on.
REQUEST_WINDOW = 128 << 10
_NEVER = -1


class Call:
    """A call.

    Attributes:
        id: number of the client's stream.
        opened_s: when it began.
        begun_s: since when its message may take its time.
        quiet_since_s: since when nothing has been passed on of it, in either direction.
        upstream_id: number of the server's stream; 0: it has none yet.
        head: its head.
        request: its messages that are coming.
        message: of a unary call, the message.
        unsent: what the server gets next.
        has_inflated: whether something of `unsent` came compressed.
        send_window: bytes of the request that the server still takes.
        receive_window: bytes of the request that the client may still send.
        num_taken: bytes that the client has not been told of having been taken.
        num_held: bytes of it that the door counts.
        num_held_inflated: of those, the ones that came compressed.
        has_client_ended: whether the client has sent everything.
        has_request_ended: whether `unsent` is the rest.
        has_sent_all: whether the server has got everything.
        window: what the client takes of the answer.
        boundary: where the answer's messages begin; followed in streams only.
        num_parts: parts of the answer that the client has got; counted in streams only.
        has_answer_head: whether the client has got the head of an answer.
        has_server_answered: whether it was the server's.
        has_server_ended: whether the server has sent everything.
        error: an error in the stream, or its rest, which waits until a message of the answer is complete and
            until the client takes it; empty: none waits.
        kept: frames of the answer that the client does not take yet.
        num_kept: bytes in them.
        is_left: whether its client has left, and the server is to end it.
    """

    __slots__ = (
        "_asked_at_part",
        "_num_parts_then",
        "begun_s",
        "boundary",
        "error",
        "has_answer_head",
        "has_client_ended",
        "has_inflated",
        "has_request_ended",
        "has_sent_all",
        "has_server_answered",
        "has_server_ended",
        "head",
        "id",
        "is_left",
        "kept",
        "message",
        "num_held",
        "num_held_inflated",
        "num_kept",
        "num_parts",
        "num_taken",
        "opened_s",
        "quiet_since_s",
        "receive_window",
        "request",
        "send_window",
        "unsent",
        "upstream_id",
        "window",
    )

    def __init__(
        self, stream_id: int, head: GRPCHead, limits: Limits, answer_window: int, now_s: float
    ) -> None:
        """Set up; `answer_window`: what the client takes of each answer at first."""
        self.id = stream_id
        self.opened_s = self.begun_s = self.quiet_since_s = now_s
        self.upstream_id = 0
        self.head = head
        self.request = MessageReader(head.encoding, limits.max_body_bytes)
        self.message: Message | None = None
        self.unsent = bytearray()
        self.has_inflated = False
        self.send_window = 0
        self.receive_window = REQUEST_WINDOW
        self.num_taken = self.num_held = self.num_held_inflated = 0
        self.has_client_ended = self.has_request_ended = self.has_sent_all = False
        self.window = AnswerWindow(answer_window, answer_window)
        self.boundary = MessageBoundary()
        self.num_parts = self._num_parts_then = 0
        self._asked_at_part = _NEVER
        self.has_answer_head = self.has_server_answered = self.has_server_ended = False
        self.error = bytearray()
        self.is_left = False
        self.kept: deque[Frame] = deque()
        self.num_kept = 0

    @property
    def is_stream(self) -> bool:
        """Whether the request may have any number of messages, each of them checked."""
        return self.head.kind == "stream"

    @property
    def waits_since_s(self) -> float | None:
        """Since when a message has been coming; None: none is."""
        if self.has_server_ended:
            return None
        if self.is_stream:
            return None if self.error else self.request.since_s
        return None if self.has_request_ended else self.begun_s

    def restart_clock(self, now_s: float) -> None:
        """Count the time that a message takes from now on."""
        self.begun_s = now_s
        if self.request.since_s is not None:
            self.request.since_s = now_s

    def note_message(self, now_s: float) -> None:
        """A message of a stream has passed: the server owes something for it."""
        self._asked_at_part = self.num_parts
        self.quiet_since_s = now_s

    @property
    def has_asked(self) -> bool:
        """Whether a message of a stream has passed."""
        return self._asked_at_part != _NEVER

    def note_parts(self, now_s: float) -> None:
        """See whether something of the answer has come since the last time."""
        if self.num_parts != self._num_parts_then:
            self._num_parts_then = self.num_parts
            self.quiet_since_s = now_s

    def quiet_s(self, limits: Limits) -> float | None:
        """Return for how long it may be quiet when room is short; None: as long as it wants.

        A call that has brought nothing has the time of a head, a stream between two messages that of a
        message. Neither has a limit while a message comes, after the client has ended the request, and while
        the server has not begun to answer the last message.
        """
        if self.request.since_s is not None or self.message is not None or self.has_client_ended:
            return None
        if not self.has_asked:
            return limits.head_s
        return None if self._asked_at_part == self.num_parts else limits.body_s

    def drop_request(self) -> None:
        """Hold nothing of the request any more."""
        self.request.drop()
        self.message = None
        self.unsent.clear()

    def keep(self, each: Frame) -> None:
        """Keep a frame of the answer behind the others."""
        self.kept.append(each)
        self.num_kept += len(each.payload)

    def keep_first(self, each: Frame) -> None:
        """Keep a frame of the answer, or its rest, before the others."""
        self.kept.appendleft(each)
        self.num_kept += len(each.payload)

    def take_kept(self) -> Frame:
        """Return the first frame that is kept, which it is no longer."""
        each = self.kept.popleft()
        self.num_kept -= len(each.payload)
        return each

    def drop_kept(self) -> None:
        """Keep nothing."""
        self.kept.clear()
        self.num_kept = 0

    @property
    def num_inflated(self) -> int:
        """Bytes of the request that are held, and that came as fewer."""
        return len(self.unsent) if self.has_inflated else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the request and of the answer that are held."""
        num_message = 0 if self.message is None else len(self.message.content)
        num_request = self.request.num_bytes + num_message + len(self.unsent)
        return num_request + len(self.error) + self.num_kept
