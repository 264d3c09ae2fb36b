"""Finds a model on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from naiad.errors import ConfigError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

_GGUF_SUFFIX = ".gguf"
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
    return path.suffix == _GGUF_SUFFIX and path.is_file()


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
    path = path_of_text(name)
    if not name or not (path.is_dir() or is_gguf(path)):
        raise ConfigError(key, name, "'default', an existing model directory or a .gguf file")
    return path


def path_of_text(text: str) -> Path:
    """Return the path that a configuration file names.

    The bytes of its name are UTF-8 in every process: the stubs' Python takes file names to be ASCII, whatever
    the locale is, and refuses a text that has other characters.
    """
    return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))


def text_of_path(path: Path | str, key: str = "model_dir") -> str:
    """Return the text for a configuration file of a path, or of another word of the command line.

    Raises:
        ConfigError: there is none, because the word's bytes are not UTF-8.
    """
    try:
        return os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(key, str(path), "text in UTF-8; rename a directory whose name is not") from None
