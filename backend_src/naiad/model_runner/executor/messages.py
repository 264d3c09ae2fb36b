"""The messages between a `RemoteRunner` and its process.

The process handles messages in order. The runner waits only for messages that have an answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from naiad.config import EngineConfig
from naiad.errors import NaiadError, Status, error_with_status
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.model_runner.step_costs import MeasuredCosts
from naiad.model_runner.token_budget import TokenBudget
from naiad.outputs import MemoryUse, ModelOutput, StepBatch
from naiad.sequence import SamplingParams


class Start(msgspec.Struct, tag="start", frozen=True):
    """Load the models; the answer is `Started` or `Failed`."""

    config: EngineConfig


class Launch(msgspec.Struct, tag="launch", frozen=True):
    """Queue a step of the model, or of the draft model."""

    step: StepBatch
    is_draft: bool = False


class Collect(msgspec.Struct, tag="collect", frozen=True):
    """Wait for the oldest step that has not been collected; the answer is its `StepResult` or `Failed`."""

    is_draft: bool = False


class ClearBlocks(msgspec.Struct, tag="clear_blocks", frozen=True):
    """Set blocks of each KV group to 0."""

    block_ids: list[list[int]]


class ClearSlots(msgspec.Struct, tag="clear_slots", frozen=True):
    """Set single slots of each KV group to 0, in the model's cache or in the draft model's."""

    slots: list[list[int]]
    is_draft: bool = False


class NeedsIds(msgspec.Struct, tag="needs_ids", frozen=True):
    """Ask whether rows with these parameters need all their ids on the host; the answer is `Answer`."""

    params: SamplingParams


class MeasureCosts(msgspec.Struct, tag="measure_costs", frozen=True):
    """Measure the cost of steps; the answer is `Costs`."""

    is_draft: bool = False


class EndStart(msgspec.Struct, tag="end_start", frozen=True):
    """Startup is complete; kernels that are compiled from now on count as late."""


class ReportUse(msgspec.Struct, tag="report_use", frozen=True):
    """Report the memory in use and the number of late compiles; the answer is `Use`."""


RunnerMessage = (
    Start | Launch | Collect | ClearBlocks | ClearSlots | NeedsIds | MeasureCosts | EndStart | ReportUse
)


class Started(msgspec.Struct, tag="started", frozen=True, kw_only=True):
    """The runner is ready; the fields are those of `ModelRunner`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    kv_groups: tuple[KVGroupSpec, ...]
    device_type: str
    token_budget: TokenBudget
    has_draft_runner: bool


class StepResult(msgspec.Struct, tag="result", frozen=True):
    """The result of a step, and how many kernels were compiled after startup."""

    output: ModelOutput
    num_late_compiles: int


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """The answer to a yes-or-no question."""

    is_true: bool


class Costs(msgspec.Struct, tag="costs", frozen=True):
    """The measured cost of steps."""

    costs: MeasuredCosts


class Use(msgspec.Struct, tag="use", frozen=True):
    """The memory that the process holds."""

    memory: MemoryUse


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Startup or a step has raised an error."""

    status: Status
    message: str


RunnerAnswer = Started | StepResult | Answer | Costs | Use | Failed


def _to_plain(value: object) -> tuple[Status, str]:
    """Convert an error to its status and its message."""
    if isinstance(value, NaiadError):
        return value.status, str(value)
    raise NotImplementedError(f"{type(value).__name__} can not be sent")


def _from_plain(kind: type, value: Any) -> NaiadError:
    """Convert a status and a message back to the error."""
    if kind is NaiadError:
        status, message = value
        return error_with_status(status, message)
    raise NotImplementedError(f"{kind.__name__} can not be received")


encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
message_decoder: msgspec.msgpack.Decoder[RunnerMessage] = msgspec.msgpack.Decoder(
    RunnerMessage, dec_hook=_from_plain
)
answer_decoder: msgspec.msgpack.Decoder[RunnerAnswer] = msgspec.msgpack.Decoder(
    RunnerAnswer, dec_hook=_from_plain
)
