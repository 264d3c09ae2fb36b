"""The thread of a model that checks whether clients are still connected and writes metrics."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from naiad.engine_process import FileLock
from naiad.engine_process.observations import ObservationBatch
from naiad.outputs import EngineStats
from naiad.triton_server.service.llm_service import LLMService
from naiad.triton_server.service.retirement import Retirement

# How often metrics are written while requests run. A write is an IPC round trip for each value, and some
# values change with each step.
WRITE_PERIOD_S = 0.1


class WrittenMetrics(Protocol):
    """A model's metrics on Triton's metrics port."""

    def update(self, stats: EngineStats, batch: ObservationBatch) -> bool:
        """Write what has changed; return whether something remains that there was no time to write."""

    def delete(self) -> None:
        """Remove the metrics from the port."""


class Housekeeper:
    """Runs a service's housekeeping rounds until it is stopped."""

    def __init__(
        self,
        service: LLMService,
        lock: FileLock,
        make_metrics: Callable[[], WrittenMetrics],
        retirement: Retirement,
    ) -> None:
        """Start the thread.

        Args:
            service: the service to run the rounds of.
            lock: the lock of the metrics. A reloaded model's old instance has metrics with the same labels;
                when it deletes its own, the server deletes the new ones too and crashes (seen on 2.51). So
                only one instance has metrics at a time.
            make_metrics: called by the thread once it holds the lock.
            retirement: notices when the server has no use for this process.
        """
        self._service = service
        self._lock = lock
        self._make_metrics = make_metrics
        self._retirement = retirement
        self._metrics: WrittenMetrics | None = None
        self._server_pid = os.getppid()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="naiad-housekeeping", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(timeout=5)

    def delete_metrics(self) -> None:
        """Remove the metrics from the port and release the lock for the next instance."""
        if self._metrics is not None:
            self._metrics.delete()
            self._metrics = None
        self._lock.release()

    def _run(self) -> None:
        next_write_s = 0.0
        while not self._stopping.is_set() and not self._is_left():
            pause_s = self._service.housekeep()
            self._retirement.look(self._service)
            # Before a long rest everything is written: news may have come too late for the last one to end.
            if pause_s > WRITE_PERIOD_S or time.monotonic() >= next_write_s:
                has_more = self._write_metrics()
                if has_more and not self._service.open_streams():
                    continue
                next_write_s = 0.0 if has_more else time.monotonic() + WRITE_PERIOD_S
            if self._service.rest(pause_s):
                next_write_s = 0.0

    def _write_metrics(self) -> bool:
        """Write what there is time for; return whether something remains."""
        if self._metrics is None and self._lock.try_take():
            self._metrics = self._make_metrics()
        if self._metrics is None or self._is_left():
            return False
        # The stats are read first: then the observations include every request that they count.
        stats = self._service.stats
        return self._metrics.update(stats, self._service.observations.take())

    def _is_left(self) -> bool:
        """Whether the server has died. A call to it would then hang, and with it this whole process."""
        return os.getppid() != self._server_pid
