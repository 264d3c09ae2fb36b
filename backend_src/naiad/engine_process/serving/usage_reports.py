"""Tells the engine's owner, and a file, what each tenant has used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from naiad.line_file import append
from naiad.usage import TenantUsage, UsageLine, since

REPORT_S = 5.0

logger = logging.getLogger(__name__)


class UsageReports:
    """Reports every few seconds while there is something to report."""

    def __init__(
        self,
        usages: Callable[[], list[TenantUsage]],
        model: str,
        file: Path | None,
        interval_s: float = REPORT_S,
    ) -> None:
        """Start with nothing used.

        Args:
            usages: returns what each tenant has used until now.
            model: the name of the model in the file.
            file: gets a line for each tenant and report; None: there is none.
            interval_s: seconds between two reports.
        """
        self._usages = usages
        self._model = model
        self._file = file
        self._interval_s = interval_s
        self._has_news = False
        self._due_s = 0.0
        self._written: list[TenantUsage] = []
        self._written_s = time.time()
        self._is_failing = False

    def wait_s(self) -> float | None:
        """Seconds until the next report is due; None: there is nothing to report."""
        return max(0.0, self._due_s - time.monotonic()) if self._has_news else None

    def take(self, has_work: bool) -> list[TenantUsage] | None:
        """Return what each tenant has used until now, if a report is due; it is written then.

        Args:
            has_work: whether the engine works, and so uses what is still to be reported.
        """
        self._has_news |= has_work
        if not self._has_news or time.monotonic() < self._due_s:
            return None
        self._due_s = time.monotonic() + self._interval_s
        self._has_news = has_work
        return self.flush()

    def flush(self) -> list[TenantUsage]:
        """Return what each tenant has used until now, and write what has not been written."""
        usages = self._usages()
        if self._file is not None:
            self._write(self._file, usages)
        return usages

    def _write(self, file: Path, usages: Sequence[TenantUsage]) -> None:
        # The wall clock may be set back; a line never ends before it begins.
        now_s = max(time.time(), self._written_s)
        lines = [
            UsageLine(**asdict(each), begin_s=self._written_s, end_s=now_s, model=self._model)
            for each in since(usages, self._written)
        ]
        try:
            if lines:
                append(file, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        except OSError as error:
            # What could not be written is in the next report.
            if not self._is_failing:
                logger.warning("%s can not be written: %s", file, error)
            self._is_failing = True
            return
        self._is_failing = False
        self._written, self._written_s = list(usages), now_s
