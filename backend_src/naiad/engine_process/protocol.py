"""The messages between the engine process and its clients, as msgpack in frames.

Both ends decode into the typed messages below; anything else is an error of the sender, never code that
runs.
"""

from __future__ import annotations

import logging

import msgspec

from naiad.errors import InternalError
from naiad.frames import MAX_FRAME_BYTES, frame
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest

# Of one message; what is left of a frame is ample for everything else in it.
MAX_LOGITS_BYTES = MAX_FRAME_BYTES // 2


class AddRequests(msgspec.Struct, tag="add", frozen=True):
    """Rows to serve; those refused are answered by an error output each."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Sequences whose clients are gone or asked to stop; each ends with `cancelled`."""

    sequence_ids: list[int]


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Finish what runs, then exit."""


class StopServing(msgspec.Struct, tag="stop", frozen=True):
    """Refuse what is new; whatever has not finished after `timeout_s` ends with an error.

    Taken from every door: the server is shutting down for all of them.
    """

    timeout_s: float


class StopRequests(msgspec.Struct, tag="cancel", frozen=True):
    """Cancel the requests that carry this id of their clients'; passed on to every other door."""

    request_id: str


ClientMessage = AddRequests | Abort | Drain | StopServing | StopRequests


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The engine serves. Sent once, to each connection.

    Attributes:
        max_model_len: tokens of prompt and output together.
        vocab_size: ids are in [0, vocab_size).
        eos_token_ids: every id that ends a text.
        max_num_seqs: sequences that run at once.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    max_num_seqs: int
    stats: EngineStats


class StartFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine can not start; it exits after this."""

    message: str


class StepDone(msgspec.Struct, tag="step", frozen=True):
    """Everything one step (or one intake) has to say.

    Attributes:
        outputs: of sequences of this door.
        stats: None: refusals, of which the engine has not heard; what was told before holds.
    """

    outputs: list[RequestOutput]
    stats: EngineStats | None


EngineMessage = Ready | StartFailed | StepDone | StopRequests

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
engine_message_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def encode_frame(message: ClientMessage | EngineMessage) -> bytes:
    """The message as one frame."""
    return frame(_encoder.encode(message))


def encode_requests(requests: list[EngineRequest]) -> bytes:
    """Rows to serve as one frame.

    Raises:
        InternalError: a value of theirs can not be sent.
    """
    try:
        return encode_frame(AddRequests(requests))
    except (OverflowError, TypeError, ValueError) as error:
        logger.error("a request can not be sent to the engine: %s: %s", type(error).__name__, error)
        raise InternalError("the request can not be sent to the engine") from error


def split_outputs(outputs: list[RequestOutput]) -> list[list[RequestOutput]]:
    """A step's outputs, in order, in as many messages as their logits need; at least one.

    One output alone has no more than `MAX_LOGITS_BYTES`: a request with more is refused.
    """
    parts: list[list[RequestOutput]] = [[]]
    num_bytes = 0
    for output in outputs:
        size = len(output.context_logits) + sum(map(len, output.generation_logits))
        num_bytes += size
        if num_bytes > MAX_LOGITS_BYTES and parts[-1]:
            parts.append([])
            num_bytes = size
        parts[-1].append(output)
    return parts
