"""Which of the processes that a server starts, one after another, for a model is the one that it uses."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Place:
    """What the process has that was asked last."""

    def __init__(self, path: Path, number: int) -> None:
        """Set up.

        Args:
            path: the place's file, the same for each process of the model.
            number: tells this process from the others.
        """
        self._path = path
        self._number = number

    def take(self, asked_s: float) -> None:
        """Take the place, unless another process has been asked later.

        Args:
            asked_s: when this process was asked last, in seconds of `time.monotonic`, which all processes of
                a machine share.

        Raises:
            OSError: its file can not be read or written.
        """
        if not self.is_lost(asked_s):
            new = self._path.with_name(f"{self._path.name}.{self._number}")
            new.write_text(f"{self._number} {asked_s!r}", encoding="ascii")
            os.replace(new, self._path)

    def is_lost(self, asked_s: float) -> bool:
        """Whether another process has been asked later than this one was.

        Raises:
            OSError: its file can not be read.
        """
        holder, its_asked_s = self._holder()
        return holder not in (None, self._number) and its_asked_s > asked_s

    def give_up(self) -> None:
        """Leave the place, if it is not another's.

        Raises:
            OSError: its file can not be read or removed.
        """
        if self._holder()[0] == self._number:
            self._path.unlink(missing_ok=True)

    def _holder(self) -> tuple[int | None, float]:
        try:
            number, asked_s = self._path.read_text(encoding="ascii").split()
        except FileNotFoundError:
            return None, 0.0
        if float(asked_s) > time.monotonic():
            # Of before this machine was started.
            return None, 0.0
        return int(number), float(asked_s)
