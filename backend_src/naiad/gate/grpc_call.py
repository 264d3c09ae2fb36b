"""One gRPC call: what of it has come, what has been sent on, and what its client takes."""

from __future__ import annotations

from naiad.gate.answer_window import AnswerWindow
from naiad.gate.grpc_framing import MessageBoundary, MessageReader
from naiad.gate.grpc_head import GRPCHead
from naiad.gate.limits import Limits

# What a client may send of a call before it is told to go on.
REQUEST_WINDOW = 128 << 10


class Call:
    """A call.

    Attributes:
        id: number of the client's stream.
        begun_s: when it began.
        upstream_id: number of the server's stream; 0: it has none yet.
        head: its head.
        request: its messages that are coming.
        message: of a unary call, the message.
        unsent: what the server gets next.
        send_window: bytes of the request that the server still takes.
        receive_window: bytes of the request that the client may still send.
        num_taken: bytes that the client has not been told of having been taken.
        num_held: bytes of it that the door counts.
        has_client_ended: whether the client has sent everything.
        has_request_ended: whether `unsent` is the rest.
        has_sent_all: whether the server has got everything.
        window: what the client takes of the answer.
        boundary: where the answer's messages begin; followed in streams only.
        has_answer_head: whether the client has got the head of an answer.
        has_server_answered: whether the server has sent one.
        pending: an error in the stream that waits for room between two messages; None: none waits.
    """

    __slots__ = (
        "begun_s",
        "boundary",
        "has_answer_head",
        "has_client_ended",
        "has_request_ended",
        "has_sent_all",
        "has_server_answered",
        "head",
        "id",
        "message",
        "num_held",
        "num_taken",
        "pending",
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
        self.begun_s = now_s
        self.upstream_id = 0
        self.head = head
        self.request = MessageReader(head.encoding, limits.max_body_bytes)
        self.message: bytes | None = None
        self.unsent = bytearray()
        self.send_window = 0
        self.receive_window = REQUEST_WINDOW
        self.num_taken = self.num_held = 0
        self.has_client_ended = self.has_request_ended = self.has_sent_all = False
        self.window = AnswerWindow(answer_window, answer_window)
        self.boundary = MessageBoundary()
        self.has_answer_head = self.has_server_answered = False
        self.pending: bytes | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the request may have any number of messages, each of them checked."""
        return self.head.kind == "stream"

    @property
    def waits_since_s(self) -> float | None:
        """Since when a message has been coming; None: none is."""
        if self.is_stream:
            return self.request.since_s if self.pending is None else None
        return None if self.has_request_ended else self.begun_s

    def restart_clock(self, now_s: float) -> None:
        """Count the time that a message takes from now on."""
        self.begun_s = now_s
        if self.request.since_s is not None:
            self.request.since_s = now_s

    @property
    def num_bytes(self) -> int:
        """Bytes of the request that are held."""
        return self.request.num_bytes + len(self.unsent) + len(self.message or b"")
