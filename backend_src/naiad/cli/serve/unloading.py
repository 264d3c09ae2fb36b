"""Tells the processes of a model that the server unloads that nobody needs them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from naiad.engine_process import Instance, Place
from naiad.engine_process.instance import claimed_names

_UNLOADING = "UNLOADING"
# Not the number of any process.
_NOBODY = -1


class VersionState(NamedTuple):
    """What the server says of a version of a model, such as "READY"."""

    model: str
    version: str
    state: str


class Unloading:
    """Gives the places of unloading models to nobody.

    Release 24.10 keeps a model as "UNLOADING" for ever if it has forgotten one of its requests. Its process
    can not know that. Whoever has lost the place ends its engine when it has rested for some time.
    """

    def __init__(self, directories: Callable[[], Iterable[Path]]) -> None:
        """Set up.

        Args:
            directories: lists the directories of the server's models' sockets.
        """
        self._directories = directories
        self._vacated: set[tuple[str, str]] = set()

    def take(self, states: Iterable[VersionState]) -> None:
        """Take what the server says of all its models; a place that can not be written stays as it is."""
        unloading = {(each.model, each.version) for each in states if each.state == _UNLOADING}
        if not unloading and not self._vacated:
            return
        for directory in self._directories():
            for model, version in self._vacated - unloading:
                with contextlib.suppress(OSError):
                    _place(directory, model, version).give_up()
            claimed = claimed_names(directory)
            for model, version in unloading:
                # Each time: a request that was on its way has taken the place again.
                if model in claimed:
                    with contextlib.suppress(OSError):
                        _place(directory, model, version).take(time.monotonic())
        self._vacated = unloading


def _place(directory: Path, model: str, version: str) -> Place:
    return Instance(directory, model, _NOBODY).place(version)
