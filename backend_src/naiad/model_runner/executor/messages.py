"""What a `RemoteRunner` and its process say to each other.

The process handles messages in the order in which they come. Only those that have an answer are waited for.
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
    """Wait for the first step that has not been collected; the answer is its `StepResult` or `Failed`."""

    is_draft: bool = False


class ClearBlocks(msgspec.Struct, tag="clear_blocks", frozen=True):
    """Overwrite blocks of each KV group."""

    block_ids: list[list[int]]


class ClearSlots(msgspec.Struct, tag="clear_slots", frozen=True):
    """Overwrite single slots of each KV group, in the model's cache or in the draft model's."""

    slots: list[list[int]]
    is_draft: bool = False


class NeedsIds(msgspec.Struct, tag="needs_ids", frozen=True):
    """The answer says whether rows with these parameters wait until all their ids are known."""

    params: SamplingParams


class MeasureCosts(msgspec.Struct, tag="measure_costs", frozen=True):
    """Measure what steps cost; the answer is `Costs`."""

    is_draft: bool = False


class EndStart(msgspec.Struct, tag="end_start", frozen=True):
    """Kernels that are compiled from now on are late."""


class ReportUse(msgspec.Struct, tag="report_use", frozen=True):
    """The answer is `Use`."""


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
    """What the model made of a step."""

    output: ModelOutput


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """Yes or no."""

    is_true: bool


class Costs(msgspec.Struct, tag="costs", frozen=True):
    """What steps cost."""

    costs: MeasuredCosts


class Use(msgspec.Struct, tag="use", frozen=True):
    """What the process holds, and how many kernels were compiled since the start."""

    memory: MemoryUse
    num_late_compiles: int


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """A start or a step has raised."""

    status: Status
    message: str


RunnerAnswer = Started | StepResult | Answer | Costs | Use | Failed


def _to_plain(value: object) -> tuple[Status, str]:
    """An error as its status and its message."""
    if isinstance(value, NaiadError):
        return value.status, str(value)
    raise NotImplementedError(f"{type(value).__name__} can not be sent")


def _from_plain(kind: type, value: Any) -> NaiadError:
    """The error that was sent."""
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
