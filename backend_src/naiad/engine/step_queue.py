"""`StepQueue`: launches steps, waits for their results and books them, in sequence or overlapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from naiad.engine.step_record import StepRecord
from naiad.engine.step_runner import StepRunner
from naiad.outputs import ModelOutput, StepBatch
from naiad.scheduler.scheduler import Scheduler


class _Launched(NamedTuple):
    step: StepBatch
    wait: Callable[[], ModelOutput]


class StepQueue:
    """Holds at most one step that has been launched but not taken."""

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: StepRunner,
        record: StepRecord,
        clock: Callable[[], float],
        overlaps: bool,
    ) -> None:
        """Start without steps.

        Args:
            scheduler: makes the steps and is updated with their results.
            model_runner: computes the steps.
            record: counts the steps.
            clock: returns the time in seconds.
            overlaps: whether to launch a step before waiting for the result of the previous one, if its rows
                can be projected.
        """
        self._scheduler = scheduler
        self._model_runner = model_runner
        self._record = record
        self._clock = clock
        self._overlaps = overlaps
        self._next: _Launched | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no step has been launched in advance."""
        return self._next is None

    def take(self) -> tuple[StepBatch, ModelOutput]:
        """Return the next step and its result, with which the scheduler has been updated."""
        launched = self._next or self._launch(self._scheduler.schedule())
        step = launched.step
        self._next = self._launch_projected(step) if self._overlaps else None
        result = launched.wait()
        self._record.end_step(step.rows, self._scheduler.running_by_id, result, self._clock())
        self._scheduler.update(step, result)
        return step, result

    def _launch(self, step: StepBatch) -> _Launched:
        self._record.begin_step(step.rows, self._scheduler.running_by_id, self._clock())
        if not step.rows:
            return _Launched(step, lambda: ModelOutput({}))
        return _Launched(step, self._model_runner.launch(step))

    def _launch_projected(self, pending: StepBatch) -> _Launched | None:
        """Launch the step that follows `pending`, if it can be made without the result of `pending`."""
        if not self._scheduler.can_overlap(pending.rows):
            return None
        step = self._scheduler.schedule_projected()
        return None if step is None else self._launch(step)
