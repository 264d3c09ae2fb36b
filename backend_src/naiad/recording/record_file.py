"""The file of records: several processes append to it, each from a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from naiad.errors import place_of
from naiad.frontend.request_families import DROPPED, WRITTEN
from naiad.line_file import append
from naiad.recording.record import RequestRecord

# The models' parameters.
RECORD_FILE, RECORD_PROMPTS = "record_file", "record_prompts"
MAX_WAITING = 1024
_CLOSE_S = 2.0

logger = logging.getLogger(__name__)


class RecordFile:
    """Writes records, a line each. Any thread may call `add`, which never waits.

    Attributes:
        family, description: of the metric that counts records.
        num_written: records that are in the file.
        num_dropped: records that were dropped: too many waited, or the file could not be written.
    """

    family = "naiad_recorded_requests_total"
    description = "Requests that were recorded, and those whose records were dropped"

    def __init__(self, path: Path) -> None:
        """Start the thread; the file has been prepared."""
        self.num_written = 0
        self.num_dropped = 0
        self._path = path
        self._waiting: deque[Callable[[], RequestRecord]] = deque()
        self._has_news = threading.Event()
        self._is_closing = False
        self._lock = threading.Lock()  # guards the number of dropped records
        self._thread = threading.Thread(target=self._run, name="naiad-records", daemon=True)
        self._thread.start()

    def add(self, make: Callable[[], RequestRecord]) -> None:
        """Have a record made and written; if too many wait, it is dropped."""
        if len(self._waiting) >= MAX_WAITING:
            self._drop()
            return
        self._waiting.append(make)
        self._has_news.set()

    def counts(self) -> dict[str, int]:
        """How many records were written and dropped, by the metric's names for it."""
        return {WRITTEN: self.num_written, DROPPED: self.num_dropped}

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._is_closing = True
        self._has_news.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while self._waiting or not self._is_closing:
            self._has_news.wait()
            self._has_news.clear()
            while self._waiting:
                self._write(self._waiting.popleft())

    def _write(self, make: Callable[[], RequestRecord]) -> None:
        try:
            append(self._path, msgspec.json.encode(make()) + b"\n")
            self.num_written += 1
        except Exception as error:  # noqa: BLE001 — only this record is lost
            if not self.num_dropped:
                reason = error if isinstance(error, OSError) else place_of(error)
                logger.warning("%s can not be written, records are dropped: %s", self._path, reason)
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1
