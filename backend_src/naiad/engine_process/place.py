"""Which of the processes that a server starts, one after another, for one instance of a model is the last."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Place:
    """What a process has until the server starts another one for the same instance of the model."""

    def __init__(self, path: Path, number: int) -> None:
        """Set up; the place is not taken yet.

        Args:
            path: the place's file, the same for each process of the instance.
            number: tells this process from the others.
        """
        self._path = path
        self._number = str(number)

    def take(self) -> None:
        """Take the place from whoever has it."""
        new = self._path.with_name(f"{self._path.name}.{self._number}")
        new.write_text(self._number, encoding="ascii")
        os.replace(new, self._path)

    def is_lost(self) -> bool:
        """Whether a later process has it. A place that was given up is taken again."""
        holder = self._holder()
        if holder is None:
            # The later process could not start. Without the directory nobody could have taken it.
            with contextlib.suppress(OSError):
                self.take()
        return holder is not None and holder != self._number

    def give_up(self) -> None:
        """Leave the place, if it is not another's."""
        if self._holder() == self._number:
            self._path.unlink(missing_ok=True)

    def _holder(self) -> str | None:
        try:
            return self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            return None
