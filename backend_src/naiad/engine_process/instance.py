"""Instances of an `llm` model: a reloaded model runs beside the old one, and versions run side by side.

Each instance has a number, which is part of its sockets' names and of its sequences' ids, so that an
acknowledgement reaches the instance that sent the chunk.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from naiad.engine_process.file_lock import FileLock
from naiad.engine_process.place import Place
from naiad.engine_process.runtime_dir import runtime_directory
from naiad.errors import StartupError

_ENGINE_SUFFIX = ".engine"
_NUMBER_SUFFIX = ".number"
_ACKS_SUFFIX = ".acks"
_NUMBER_BITS = 10
# The rest of an id is random, so that it cannot be guessed.
_RANDOM_BITS = 52


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a model.

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
        """The path of its engine's socket."""
        return self.directory / f"{self.model}.{self.number}{_ENGINE_SUFFIX}"

    @property
    def ack_socket(self) -> Path:
        """The path of the socket on which it receives acknowledgements."""
        return self.directory / f"{self.model}.{self.number}{_ACKS_SUFFIX}"

    def number_lock(self) -> FileLock:
        """The lock that the instance with this number holds."""
        return FileLock(self.directory / f"{self.model}.{self.number}{_NUMBER_SUFFIX}")

    def metrics_lock(self, version: str) -> FileLock:
        """The lock of the one instance of this version that writes the server's metrics."""
        return FileLock(self.directory / f"{self.model}.{version}.metrics")

    def place(self, version: str) -> Place:
        """The place of this version of the model."""
        return Place(self.directory / f"{self.model}.{version}.place", self.number)

    def draw_first_id(self, num_sequences: int) -> int:
        """Draw the id of a request's first sequence; its other sequences have the ids that follow."""
        return self.number << _RANDOM_BITS | secrets.randbelow((1 << _RANDOM_BITS) - num_sequences)


def claim_instance(server_pid: int, model: str) -> tuple[Instance, FileLock]:
    """Make a new instance of the model in this server.

    Returns:
        The instance, and the lock that reserves its number.

    Raises:
        StartupError: every number is taken, or the runtime directory cannot be created.
    """
    number = 0
    while number < 1 << _NUMBER_BITS:
        instance = Instance(runtime_directory(server_pid), model, number)
        lock = instance.number_lock()
        # Another instance may just have removed the directory.
        with contextlib.suppress(FileNotFoundError):
            if lock.try_take():
                return instance, lock
            number += 1
    raise StartupError(f"{model} has {number} instances: expected fewer")


def engine_sockets(directory: Path, model: str | None = None) -> list[Path]:
    """List the sockets of a server's engines.

    Args:
        directory: the server's runtime directory, which need not exist.
        model: the `llm` model that owns the engines; None: any.
    """
    sockets = sorted(_with_suffix(directory, _ENGINE_SUFFIX))
    if model is None:
        return sockets
    # Another model's name may begin with this model's name and a dot.
    name = re.compile(rf"{re.escape(model)}\.\d+{re.escape(_ENGINE_SUFFIX)}")
    return [path for path in sockets if name.fullmatch(path.name)]


def engine_names(directory: Path) -> set[str]:
    """The names of the `llm` models that own the engines of a server.

    Args:
        directory: the server's runtime directory, which need not exist.
    """
    # The name may hold dots; the number and the suffix follow it.
    return {path.name.rsplit(".", 2)[0] for path in engine_sockets(directory)}


def owner_names(directory: Path) -> set[str]:
    """The names of the `llm` models that own an engine, whether it runs or is being started again.

    Args:
        directory: the server's runtime directory, which need not exist.
    """
    return {path.name.rsplit(".", 2)[0] for path in _with_suffix(directory, _ACKS_SUFFIX)}


def claimed_names(directory: Path) -> set[str]:
    """The names of the models that have an instance: from when it is loaded until it is unloaded.

    Args:
        directory: the server's runtime directory, which need not exist.
    """
    return {path.name.rsplit(".", 2)[0] for path in _with_suffix(directory, _NUMBER_SUFFIX)}


def instance_number(sequence_id: int) -> int:
    """The number of the instance that drew the id."""
    return sequence_id >> _RANDOM_BITS


def _with_suffix(directory: Path, suffix: str) -> list[Path]:
    try:
        return list(directory.glob(f"*{suffix}"))
    except FileNotFoundError:
        # The last instance has removed the directory after it was found.
        return []
