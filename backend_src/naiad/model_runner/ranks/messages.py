"""The messages to the other ranks of a split model, and their answers.

A rank handles messages in order. Only `StartRank` has an answer, and only after it has the rank's weights.
"""

from __future__ import annotations

import msgspec

from naiad.config import EngineConfig
from naiad.errors import Status
from naiad.model_runner.graph_buckets import Buckets
from naiad.outputs import StepBatch


class StartRank(msgspec.Struct, tag="start", frozen=True):
    """Meet the other ranks and load a share of the model; the answer is `Loaded` or `Failed`.

    Attributes:
        config: the engine's configuration.
        rank: which of the ranks.
        store: the file by which the ranks find each other.
        is_native: native kernels compute the steps.
    """

    config: EngineConfig
    rank: int
    store: str
    is_native: bool


class AllocatePool(msgspec.Struct, tag="allocate", frozen=True):
    """Make the KV pool, or make it anew: so many blocks for each of the model's groups of layers."""

    num_blocks: list[int]


class CaptureGraphs(msgspec.Struct, tag="capture", frozen=True):
    """Capture graphs over the KV pool, whose exchanges are those of the first rank's; a new pool ends them.

    Attributes:
        buckets: the sizes to capture, in this order.
    """

    buckets: Buckets


class ComputeStep(msgspec.Struct, tag="step", frozen=True):
    """Compute a step up to its hidden states.

    Attributes:
        step: the step.
        replays: whether the first rank replays a graph if the step fits one.
    """

    step: StepBatch
    replays: bool


class ComputeWithoutDrafts(msgspec.Struct, tag="without_drafts", frozen=True):
    """Compute rows of the last step again, without their drafts.

    Attributes:
        sequence_ids: the rows.
        replays: as in `ComputeStep`.
    """

    sequence_ids: list[int]
    replays: bool


class ComputeLogits(msgspec.Struct, tag="logits", frozen=True):
    """Take so many hidden states from the first rank and compute their logits for this part's tokens.

    Only ranks of the first stage are told.
    """

    num_rows: int


class ZeroBlocks(msgspec.Struct, tag="zero_blocks", frozen=True):
    """Set blocks of each of the model's groups of layers to 0."""

    block_ids: list[list[int]]


class ZeroSlots(msgspec.Struct, tag="zero_slots", frozen=True):
    """Set single slots of each of the model's groups of layers to 0."""

    slots: list[list[int]]


class ForgetSequences(msgspec.Struct, tag="forget", frozen=True):
    """Drop the state of all sequences."""


class EndStart(msgspec.Struct, tag="end_start", frozen=True):
    """Nothing is measured any more: threads make room for other programs."""


RankMessage = (
    StartRank
    | AllocatePool
    | CaptureGraphs
    | ComputeStep
    | ComputeWithoutDrafts
    | ComputeLogits
    | ZeroBlocks
    | ZeroSlots
    | ForgetSequences
    | EndStart
)


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The rank has its part of the model."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The rank can not start."""

    status: Status
    message: str


RankAnswer = Loaded | Failed

encoder = msgspec.msgpack.Encoder()
message_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)
answer_decoder: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)
