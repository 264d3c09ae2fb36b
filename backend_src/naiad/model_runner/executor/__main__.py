"""The process of a `RemoteRunner`: `python -m naiad.model_runner.executor FD`.

FD is the file descriptor of one end of a socket pair.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable
from functools import partial

from naiad.errors import InternalError, NaiadError, place_of
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
    encoder,
    message_decoder,
)
from naiad.model_runner.model_runner import ModelRunner
from naiad.model_runner.paged_model import PagedModel
from naiad.outputs import ModelOutput
from naiad.parent_watch import end_with_parent

logger = logging.getLogger(__name__)


class RunnerProcess:
    """A model runner, and its steps that have been launched but not collected."""

    def __init__(self, runner: ModelRunner) -> None:
        """Serve this runner."""
        self._runner = runner
        self._launched: dict[bool, deque[Callable[[], ModelOutput]]] = {False: deque(), True: deque()}

    def handle(self, message: RunnerMessage) -> RunnerAnswer | None:
        """Handle a message and return its answer; None: the message has no answer."""
        match message:
            case Launch(step, is_draft):
                self._launched[is_draft].append(_launch(partial(self._model(is_draft).launch, step)))
            case Collect(is_draft):
                return self._collect(self._launched[is_draft].popleft())
            case ClearBlocks(block_ids):
                self._runner.clear_blocks(block_ids)
            case ClearSlots(slots, is_draft):
                self._model(is_draft).clear_slots(slots)
            case NeedsIds(params):
                return Answer(self._runner.needs_ids(params))
            case MeasureCosts(is_draft):
                return Costs(self._model(is_draft).measure_step_costs())
            case EndStart():
                self._runner.end_start()
            case ReportUse():
                return Use(self._runner.memory_use())
            case Start():
                raise AssertionError("the runner has started already")
        return None

    def _model(self, is_draft: bool) -> PagedModel:
        if not is_draft:
            return self._runner
        assert self._runner.draft_runner is not None, "there is no draft model"
        return self._runner.draft_runner

    def _collect(self, wait: Callable[[], ModelOutput]) -> StepResult | Failed:
        try:
            return StepResult(wait(), self._runner.num_late_compiles)
        except NaiadError as error:
            return Failed(error.status, str(error))
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001 — any error of torch or a kernel fails this step alone
            logger.error("a step has failed: %s", place_of(error))
            return Failed(InternalError.status, "a step has failed in the model runner's process")


def _launch(launch: Callable[[], Callable[[], ModelOutput]]) -> Callable[[], ModelOutput]:
    """Launch a step and return a function that waits for it; that raises any error of the launch.

    Raises:
        AssertionError: a bug of ours. It ends this process, so that no caller mistakes it for a failed step.
    """
    try:
        return launch()
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001 — any error of torch or a kernel is the step's result
        return partial(_raise, error)


def _raise(error: Exception) -> ModelOutput:
    raise error


def _start(message: RunnerMessage) -> tuple[ModelRunner, Started]:
    assert isinstance(message, Start), "the first message starts the runner"
    runner = ModelRunner(message.config)
    started = Started(
        vocab_size=runner.model_config.vocab_size,
        eos_token_ids=tuple(runner.model_config.eos_token_ids),
        max_model_len=runner.max_model_len,
        kv_groups=tuple(runner.kv_groups),
        device_type=runner.device.type,
        token_budget=runner.token_budget,
        has_draft_runner=runner.draft_runner is not None,
    )
    return runner, started


def main() -> int:
    """Serve one `RemoteRunner` until it closes its end of the socket pair."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    end_with_parent(lambda: None)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            runner, started = _start(message_decoder.decode(channel.receive()))
        except NaiadError as error:
            channel.send(encoder.encode(Failed(error.status, str(error))))
            return 1
        channel.send(encoder.encode(started))
        process = RunnerProcess(runner)
        while True:
            answer = process.handle(message_decoder.decode(channel.receive()))
            if answer is not None:
                channel.send(encoder.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
