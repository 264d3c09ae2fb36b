"""`StepQueue`: steps are launched, waited for and booked, one after the other or overlapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from naiad.engine.step_record import StepRecord
from naiad.engine.step_runner import StepRunner
from naiad.outputs import ModelOutput, SchedulerOutput
from naiad.scheduler.foresight import can_be_foreseen, foreseen
from naiad.scheduler.scheduler import Scheduler


class _Launched(NamedTuple):
    scheduled: SchedulerOutput
    wait: Callable[[], ModelOutput]


class StepQueue:
    """Holds at most one step that has been launched and not taken."""

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: StepRunner,
        record: StepRecord,
        clock: Callable[[], float],
        overlaps: bool,
    ) -> None:
        """Launch nothing yet.

        Args:
            scheduler: makes the steps and learns what became of them.
            model_runner: computes them.
            record: notes them.
            clock: seconds.
            overlaps: a step is launched before the result of the last one is waited for, where that can
                be foreseen.
        """
        self._scheduler = scheduler
        self._model_runner = model_runner
        self._record = record
        self._clock = clock
        self._overlaps = overlaps
        self._ahead: _Launched | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no step is under way."""
        return self._ahead is None

    def take(self) -> tuple[SchedulerOutput, ModelOutput]:
        """The next step and its result, which is booked."""
        step = self._ahead or self._launch(self._scheduler.schedule())
        self._ahead = self._launch_ahead(step.scheduled) if self._overlaps else None
        result = step.wait()
        self._record.end_step(step.scheduled.scheduled, result, self._clock())
        self._scheduler.update(step.scheduled, result)
        return step.scheduled, result

    def _launch(self, scheduled: SchedulerOutput) -> _Launched:
        self._record.begin_step(scheduled.scheduled, self._clock())
        if not scheduled.scheduled:
            return _Launched(scheduled, lambda: ModelOutput({}))
        return _Launched(scheduled, self._model_runner.launch(scheduled))

    def _launch_ahead(self, pending: SchedulerOutput) -> _Launched | None:
        """The step behind one that is under way, if it can be made without its result."""
        if not can_be_foreseen(pending.scheduled, self._scheduler.speculator):
            return None
        # The runner too has to see what is foreseen: positions and lengths.
        with foreseen(pending.scheduled):
            scheduled = self._scheduler.schedule_ahead()
            return None if scheduled is None else self._launch(scheduled)
