"""Finds a model on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from naiad.errors import ConfigError
from naiad.gguf.file import SUFFIX

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


_SNAPSHOTS = "snapshots"
_HUB_PREFIX = "models--"


def default_model_dir() -> Path:
    """Return the directory where `naiad fetch-model` puts the default model."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "naiad" / "models" / DEFAULT_MODEL_NAME


def checkpoint_name(directory: Path) -> str:
    """Return the name of the checkpoint in this directory: org/name if it is in the Hugging Face cache."""
    directory = directory.absolute()
    if is_gguf(directory):
        return directory.stem
    if directory.parent.name == _SNAPSHOTS and directory.parent.parent.name.startswith(_HUB_PREFIX):
        return directory.parent.parent.name.removeprefix(_HUB_PREFIX).replace("--", "/")
    return directory.name


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, which is a checkpoint by itself."""
    return path.suffix == SUFFIX and path.is_file()


def model_directory(name: str, key: str = "model_dir") -> Path:
    """Return the directory, or the GGUF file, of a model that is already on this machine.

    Args:
        name: "default", a directory or a file.
        key: the setting whose value `name` is.

    Raises:
        ConfigError: the directory does not exist; the message says how to get the model.
    """
    if name == "default":
        if not default_model_dir().is_dir():
            raise ConfigError(key, name, "the default model on this machine: run `naiad fetch-model` first")
        return default_model_dir()
    if not name or not (Path(name).is_dir() or is_gguf(Path(name))):
        raise ConfigError(key, name, "'default', an existing model directory or a .gguf file")
    return Path(name)
