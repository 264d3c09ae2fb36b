"""Instances of one `llm` model: a reloaded one starts beside the old, and versions stand side by side.

An instance has a number. It is part of its sockets' names and of its sequences' ids, so that an
acknowledgement finds the instance whose chunk it is for.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from naiad.engine_process.file_lock import FileLock
from naiad.engine_process.runtime_dir import runtime_directory
from naiad.errors import StartupError

_ENGINE_SUFFIX = ".engine"
_NUMBER_BITS = 10
# The rest of an id: nobody can guess it.
_RANDOM_BITS = 52


@dataclass(frozen=True, slots=True)
class Instance:
    """One of the instances of a model.

    Attributes:
        directory: the server's runtime directory.
        model: the name of the `llm` model.
        number: in 0 … 1023.
    """

    directory: Path
    model: str
    number: int

    @property
    def engine_socket(self) -> Path:
        """Where its engine listens."""
        return self.directory / f"{self.model}.{self.number}{_ENGINE_SUFFIX}"

    @property
    def ack_socket(self) -> Path:
        """Where it takes acknowledgements."""
        return self.directory / f"{self.model}.{self.number}.acks"

    def number_lock(self) -> FileLock:
        """Held by the instance that has the number."""
        return FileLock(self.directory / f"{self.model}.{self.number}.number")

    def metrics_lock(self, version: str) -> FileLock:
        """Held by the one instance of the model's version whose metrics the server has."""
        return FileLock(self.directory / f"{self.model}.{version}.metrics")

    def draw_first_id(self, num_sequences: int) -> int:
        """The id of a request's first sequence; those of the others follow it."""
        return self.number << _RANDOM_BITS | secrets.randbelow((1 << _RANDOM_BITS) - num_sequences)


def claim_instance(server_pid: int, model: str) -> tuple[Instance, FileLock]:
    """A new instance of the model in this server.

    Returns:
        The instance, and the lock that keeps its number for it.

    Raises:
        StartupError: every number is taken, or there can be no runtime directory.
    """
    number = 0
    while number < 1 << _NUMBER_BITS:
        instance = Instance(runtime_directory(server_pid), model, number)
        lock = instance.number_lock()
        # Another instance may just have taken the empty directory away.
        with contextlib.suppress(FileNotFoundError):
            if lock.try_take():
                return instance, lock
            number += 1
    raise StartupError(f"{model} has {number} instances: expected fewer")


def engine_sockets(directory: Path, model: str | None = None) -> list[Path]:
    """The sockets of a server's engines.

    Args:
        directory: the server's runtime directory; it may not be there.
        model: the `llm` model that owns them; None: any.
    """
    sockets = sorted(directory.glob(f"*{_ENGINE_SUFFIX}"))
    if model is None:
        return sockets
    # Another model's name may begin with this one's and a dot.
    name = re.compile(rf"{re.escape(model)}\.\d+{re.escape(_ENGINE_SUFFIX)}")
    return [path for path in sockets if name.fullmatch(path.name)]


def instance_number(sequence_id: int) -> int:
    """The number of the instance that drew the id."""
    return sequence_id >> _RANDOM_BITS
