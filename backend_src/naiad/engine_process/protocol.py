"""The messages between the engine process and its clients, as msgpack in frames.

Both ends decode only the typed messages below, so a frame cannot make the receiver run code.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from naiad.config.engine_config import EngineConfig
from naiad.config.model_location import checkpoint_name
from naiad.engine_process.observations import ObservationBatch
from naiad.errors import InternalError, place_of
from naiad.frames import MAX_FRAME_BYTES, frame
from naiad.outputs import EngineStats, RequestOutput, TokenLogProbs
from naiad.sequence import EngineRequest
from naiad.snapshot import EngineSnapshot
from naiad.usage import TenantUsage

# Limit of the logits and of the prompts' log-probabilities in one message; the other half of a frame is
# ample for everything else.
MAX_LOGITS_BYTES = MAX_FRAME_BYTES // 2


class AddRequests(msgspec.Struct, tag="add", frozen=True):
    """Requests to serve; each one that is refused is answered by an error output."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Abort sequences, whose clients are gone or have cancelled; each ends with `cancelled`."""

    sequence_ids: list[int]


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Finish the running sequences, then exit; only the owner may send it."""


class StopServing(msgspec.Struct, tag="stop", frozen=True):
    """Refuse new requests; sequences that have not finished after `timeout_s` end with an error.

    Any client may send it: the server is shutting down for all of them. The engine answers with `Busy` at
    once, also while it is loaded or computes a step.
    """

    timeout_s: float


class StopRequests(msgspec.Struct, tag="cancel", frozen=True):
    """Cancel the requests to which clients gave this id; the engine forwards it to every other client."""

    request_id: str


class Observed(msgspec.Struct, tag="observed", frozen=True):
    """What a client that writes no metrics has observed; the engine forwards it to its owner, which does."""

    batch: ObservationBatch


class AskSnapshot(msgspec.Struct, tag="look", frozen=True):
    """Send one `SnapshotTaken`, between two steps. Only to engines whose `Ready` says `tells_snapshots`."""


ClientMessage = AddRequests | Abort | Drain | StopServing | StopRequests | Observed | AskSnapshot


class Checkpoint(msgspec.Struct, frozen=True):
    """The checkpoint that an engine serves.

    Attributes:
        model_dir: the absolute path of its directory.
        served_name: its name for clients that choose among several models.
    """

    model_dir: str
    served_name: str

    @classmethod
    def of(cls, config: EngineConfig) -> Checkpoint:
        """Describe the checkpoint that this configuration names."""
        directory = Path(config.model_dir).absolute()
        return cls(str(directory), config.served_name or checkpoint_name(directory))


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The engine serves. Sent once to each client.

    Attributes:
        checkpoint: what the engine serves, for clients that tokenize.
        created_s: when the engine began to serve, in Unix time.
        started_s: the same in seconds of `time.monotonic`, which all processes of a machine share.
        max_model_len: maximum number of prompt and output tokens together.
        vocab_size: ids are in [0, vocab_size).
        eos_token_ids: all ids that end a text.
        max_num_seqs: maximum number of sequences that run at once.
        stats: the engine's gauges now.
        tells_snapshots: it answers `AskSnapshot`; older engines drop clients that ask.
    """

    checkpoint: Checkpoint
    created_s: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    max_num_seqs: int
    stats: EngineStats
    tells_snapshots: bool = False
    started_s: float = 0.0


class StartFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine can not start, and exits after this message."""

    message: str


class StepDone(msgspec.Struct, tag="step", frozen=True):
    """The outputs of one step, or the errors of refused requests.

    Attributes:
        outputs: outputs of this client's sequences.
        stats: the engine's gauges; None for refusals, which never reach the engine: the earlier stats remain
            valid.
    """

    outputs: list[RequestOutput]
    stats: EngineStats | None


class SnapshotTaken(msgspec.Struct, tag="snapshot", frozen=True):
    """What the engine is doing; sent only to a client that has asked, once for each time.

    Attributes:
        snapshot: the same for every client.
        own_ids: for this client's sequences, the engine's id in the snapshot → the client's id.
    """

    snapshot: EngineSnapshot
    own_ids: dict[int, int]


class UsageReport(msgspec.Struct, tag="usage", frozen=True):
    """What each tenant has used since the engine's start; sent to the owner every few seconds."""

    usages: list[TenantUsage]


class Busy(msgspec.Struct, tag="busy", frozen=True):
    """Whether sequences of any client run or wait.

    It is sent to the owner when that changes, and to a client that has sent `StopServing`. The thread that
    sends it does not compute, so it comes even while a step hangs.
    """

    is_busy: bool


EngineMessage = Ready | StartFailed | StepDone | StopRequests | Observed | SnapshotTaken | UsageReport | Busy

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
engine_message_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def encode_frame(message: ClientMessage | EngineMessage) -> bytes:
    """Encode a message as one frame."""
    return frame(_encoder.encode(message))


def encode_requests(requests: list[EngineRequest]) -> bytes:
    """Encode requests as one frame.

    Raises:
        InternalError: one of their values cannot be encoded.
    """
    try:
        return encode_frame(AddRequests(requests))
    except (OverflowError, TypeError, ValueError) as error:
        logger.error("a request can not be sent to the engine: %s", place_of(error))
        raise InternalError("the request can not be sent to the engine") from error


def _log_probs_bytes(log_probs: TokenLogProbs) -> int:
    """Return a bound on the bytes in which one token's log-probabilities are sent."""
    return 24 + 14 * len(log_probs.top_token_ids)


def split_outputs(outputs: list[RequestOutput]) -> list[list[RequestOutput]]:
    """Split a step's outputs, in order, over as many messages as their details need; at least one.

    A single output never exceeds `MAX_LOGITS_BYTES`: requests for more logits are refused.
    """
    parts: list[list[RequestOutput]] = [[]]
    num_bytes = 0
    for output in outputs:
        size = len(output.context_logits) + sum(map(len, output.generation_logits))
        if output.prompt_log_probs:
            size += len(output.prompt_log_probs) * _log_probs_bytes(output.prompt_log_probs[0])
        num_bytes += size
        if num_bytes > MAX_LOGITS_BYTES and parts[-1]:
            parts.append([])
            num_bytes = size
        parts[-1].append(output)
    return parts
