"""A language model's four models in a repository, made from those that the project ships."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from naiad.cli.repository import ModelEntry, find_repository, read_repository, with_parameters, write_model
from naiad.cli.served_models import LLM_NAME, SERVED_NAME
from naiad.errors import StartupError


@dataclass(frozen=True, slots=True)
class NewModel:
    """What to write.

    Attributes:
        name: what `naiad repository` calls it.
        prefix: of the names of its models; "" for a repository's first.
        max_batch_size: rows of a request; None: as shipped.
        parameters: text for the parameters of those models that have them.
    """

    name: str
    prefix: str
    max_batch_size: int | None
    parameters: Mapping[str, str]


def add_model(model: NewModel, repository: Path) -> list[str]:
    """Write the models, each whole or not at all.

    Returns:
        Their names.

    Raises:
        StartupError: one is there already, or can not be written.
    """
    template = find_repository(None)
    entries = read_repository(template)
    names = [model.prefix + entry.name for entry in entries]
    for name in names:
        if (repository / name).exists():
            raise StartupError(
                f"{repository / name} exists: choose another --name, or remove that model first"
            )
    try:
        # In the repository: what is beside it may be another file system.
        with tempfile.TemporaryDirectory(dir=repository, prefix=".naiad-") as folder:
            for entry, name in zip(entries, names, strict=True):
                write_model(template / entry.name, Path(folder) / name, _config(entry, model))
            for name in names:
                (Path(folder) / name).rename(repository / name)
    except OSError as error:
        raise StartupError(f"{repository} can not be written: {error.strerror}") from error
    return names


def _config(entry: ModelEntry, model: NewModel) -> Any:
    parameters = dict(model.parameters)
    if LLM_NAME in entry.parameters:
        parameters[LLM_NAME] = model.prefix + entry.parameters[LLM_NAME]
    config = type(entry.config)()
    config.CopyFrom(with_parameters(entry, parameters).config)
    config.name = model.prefix + entry.name
    if model.max_batch_size is not None:
        config.max_batch_size = model.max_batch_size
    for step in config.ensemble_scheduling.step:
        step.model_name = model.prefix + step.model_name
    if entry.is_engine:
        config.parameters[SERVED_NAME].string_value = model.name
    return config
