"""The file of records: several processes append to it, each from a thread of its own."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from naiad.errors import ConfigError
from naiad.frontend.request_families import DROPPED, WRITTEN
from naiad.recording.record import RequestRecord

# The models' parameters.
RECORD_FILE, RECORD_PROMPTS = "record_file", "record_prompts"
MAX_WAITING = 1024
_CLOSE_S = 2.0

logger = logging.getLogger(__name__)


def prepare(path: Path) -> None:
    """Make the file, for this user alone, or check the one that there is.

    Raises:
        ConfigError: it cannot be written, or others may read it.
    """
    try:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError("--record", str(path), f"a file that can be written ({error.strerror})") from None
    try:
        status = os.fstat(opened)
    finally:
        os.close(opened)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError("--record", str(path), "a new file, or one that only you may read (mode 0600)")


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
            line = msgspec.json.encode(make()) + b"\n"
            # Opened for each record: the file may be moved away while it grows.
            opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # In one call, so that the lines of several processes do not mix.
                if os.write(opened, line) != len(line):
                    raise OSError("the disk is full")
            finally:
                os.close(opened)
            self.num_written += 1
        except Exception as error:  # noqa: BLE001 — only this record is lost
            if not self.num_dropped:
                logger.warning("%s can not be written, records are dropped: %s", self._path, error)
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1
