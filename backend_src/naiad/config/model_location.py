"""Finds a model on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from naiad.errors import ConfigError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


def default_model_dir() -> Path:
    """Return the directory where `naiad fetch-model` puts the default model."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "naiad" / "models" / DEFAULT_MODEL_NAME


def model_directory(name: str, key: str = "model_dir") -> Path:
    """Return the directory of a model that is already on this machine.

    Args:
        name: "default" or a directory.
        key: the setting whose value `name` is.

    Raises:
        ConfigError: the directory does not exist; the message says how to get the model.
    """
    if name == "default":
        if not default_model_dir().is_dir():
            raise ConfigError(key, name, "the default model on this machine: run `naiad fetch-model` first")
        return default_model_dir()
    if not name or not Path(name).is_dir():
        raise ConfigError(key, name, "'default' or an existing model directory")
    return Path(name)
