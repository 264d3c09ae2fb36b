"""`RemoteRunner` computes steps with a model runner in a separate process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import torch

from naiad.config import EngineConfig
from naiad.errors import InternalError, StartupError, error_with_status
from naiad.grammar import Grammars
from naiad.model_runner.channel import Channel
from naiad.model_runner.executor.messages import (
    Answer,
    ClearBlocks,
    ClearSlots,
    Collect,
    Costs,
    EndStart,
    Failed,
    Launch,
    MeasureCosts,
    NeedsIds,
    ReportUse,
    RunnerAnswer,
    RunnerMessage,
    Start,
    Started,
    StepResult,
    Use,
    answer_decoder,
    encoder,
)
from naiad.model_runner.step_costs import MeasuredCosts
from naiad.outputs import MemoryUse, ModelOutput, StepBatch
from naiad.sequence import SamplingParams

_END_S = 10.0
_Kind = TypeVar("_Kind", bound=RunnerAnswer)


@dataclass(frozen=True, slots=True)
class ServedVocabulary:
    """The part of the checkpoint's configuration that is needed in this process; a `ServedModel`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


class RemoteRunner:
    """A model runner whose models, KV caches and sampler are in another process.

    Its methods and attributes are those of `ModelRunner`. It is used by one thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the process and wait until it has loaded the models.

        Raises:
            StartupError: the process can not start; the message comes from it.
        """
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "naiad.model_runner.executor", str(there.fileno())],
                pass_fds=[there.fileno()],
            )
        self._channel = Channel(here)
        self._num_late_compiles = 0
        try:
            started = self._ask(Start(config), Started)
        except InternalError as error:
            self.close()
            raise StartupError(str(error)) from error
        except BaseException:
            self.close()
            raise
        self.model_config = ServedVocabulary(started.vocab_size, started.eos_token_ids)
        self.max_model_len = started.max_model_len
        self.kv_groups = started.kv_groups
        self.device = torch.device(started.device_type)
        self.token_budget = started.token_budget
        # The other process has its own.
        self.grammars = Grammars(config.model_dir, started.vocab_size, started.eos_token_ids)
        self.draft_runner = RemoteDraftRunner(self) if started.has_draft_runner else None

    @property
    def pid(self) -> int:
        """The process id of the model runner's process."""
        return self._process.pid

    @property
    def num_late_compiles(self) -> int:
        """Number of kernels that were compiled after startup."""
        return self._num_late_compiles

    def memory_use(self) -> MemoryUse:
        """Return the memory that the other process holds now."""
        return self._ask(ReportUse(), Use).memory

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        """Send a step; see `StepRunner.launch`.

        Raises:
            InternalError: the process has ended. Waiting for the result may raise it too.
        """
        return self.launch_on(step, is_draft=False)

    def launch_on(self, step: StepBatch, is_draft: bool) -> Callable[[], ModelOutput]:
        """Like `launch`, for the model or for the draft model."""
        self._send(Launch(step, is_draft))
        return partial(self._collect, is_draft)

    def _collect(self, is_draft: bool) -> ModelOutput:
        result = self._ask(Collect(is_draft), StepResult)
        self._num_late_compiles = result.num_late_compiles
        return result.output

    def needs_ids(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters can not be launched before its last id is known."""
        return self._ask(NeedsIds(params), Answer).is_true

    def clear_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Set blocks of each KV group to 0, after rows that used them have failed."""
        self._send(ClearBlocks([list(each) for each in block_ids]))

    def clear_slots(self, slots: Sequence[Sequence[int]], is_draft: bool = False) -> None:
        """Set single slots of each KV group to 0, in the model's cache or in the draft model's."""
        self._send(ClearSlots([list(each) for each in slots], is_draft))

    def measure_step_costs(self, is_draft: bool = False) -> MeasuredCosts:
        """Measure steps of the model, or of the draft model, in the other process."""
        return self._ask(MeasureCosts(is_draft), Costs).costs

    def end_start(self) -> None:
        """End startup: kernels that are compiled from now on count as late."""
        self._send(EndStart())

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: RunnerMessage) -> None:
        try:
            self._channel.send(encoder.encode(message))
        except OSError as error:
            raise self._lost() from error

    def _ask(self, message: RunnerMessage, kind: type[_Kind]) -> _Kind:
        self._send(message)
        try:
            answer = answer_decoder.decode(self._channel.receive())
        except (EOFError, OSError) as error:
            raise self._lost() from error
        except (ValueError, msgspec.DecodeError) as error:
            self._process.kill()
            raise InternalError(f"the model runner's answer cannot be read: {error}") from error
        if isinstance(answer, Failed):
            raise error_with_status(answer.status, answer.message)
        assert isinstance(answer, kind), f"{kind.__name__} was expected, not {type(answer).__name__}"
        return answer

    def _lost(self) -> InternalError:
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_S)
        return InternalError(f"the model runner's process has ended (exit status {code})")


class RemoteDraftRunner:
    """The draft model of a `RemoteRunner`; see `DraftRunner`."""

    def __init__(self, runner: RemoteRunner) -> None:
        """Share the runner's process."""
        self._runner = runner

    def run(self, step: StepBatch) -> ModelOutput:
        """Compute one step of the draft model."""
        return self._runner.launch_on(step, is_draft=True)()

    def clear_slots(self, slots: Sequence[Sequence[int]]) -> None:
        """Set single slots of each KV group to 0 in the draft model's cache."""
        self._runner.clear_slots(slots, is_draft=True)

    def measure_step_costs(self) -> MeasuredCosts:
        """Measure the cost of the draft model's steps."""
        return self._runner.measure_step_costs(is_draft=True)
