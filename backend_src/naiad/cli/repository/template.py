"""Writes the models of a new language model into a repository, based on the shipped ones."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from naiad.cli.repository.model_entries import write_model
from naiad.cli.repository.presets import PRESETS, shipped_model
from naiad.cli.repository.served_models import SERVED_NAME
from naiad.errors import StartupError
from naiad.frontend.model_configs import DEFAULT_MAX_BATCH_SIZE, Choices, config_text


@dataclass(frozen=True, slots=True)
class NewModel:
    """A language model to write.

    Attributes:
        name: its name in `naiad repository`.
        prefix: prefix of the names of its models; "" for the first language model of a repository.
        max_batch_size: maximum number of rows of a request; None: as shipped.
        parameters: values of parameters, for each of its models that has them.
        preset: the preset, which selects the models and their names.
        is_decoupled: whether a request may have any number of responses.
    """

    name: str
    prefix: str
    max_batch_size: int | None
    parameters: Mapping[str, str]
    preset: str = "naiad"
    is_decoupled: bool = True

    def name_of(self, shipped: str) -> str:
        """The name that a shipped model gets."""
        return self.prefix + PRESETS[self.preset][shipped]


def add_model(model: NewModel, repository: Path) -> list[str]:
    """Write the models: all of them, or none.

    Returns:
        The names of the models.

    Raises:
        StartupError: a model exists already, or cannot be written.
    """
    choices = _choices(model)
    sources = [shipped_model(name) for name in PRESETS[model.preset]]
    names = [model.name_of(source.name) for source in sources]
    for name in names:
        if (repository / name).exists():
            raise StartupError(
                f"{repository / name} exists: choose another --name, or remove that model first"
            )
    try:
        # Inside the repository, because its parent may be on another file system.
        with tempfile.TemporaryDirectory(dir=repository, prefix=".naiad-") as folder, ExitStack() as undo:
            for source, name in zip(sources, names, strict=True):
                write_model(source, Path(folder) / name, config_text(source.name, choices))
            for name in names:
                (Path(folder) / name).rename(repository / name)
                undo.callback(shutil.rmtree, repository / name, ignore_errors=True)
            undo.pop_all()
    except OSError as error:
        raise StartupError(f"{repository} can not be written: {_reason(error)}") from error
    return names


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error):
        # Of each file that was not copied: its path, that of the copy, and the reason.
        _, _, reason = error.args[0][0]
        return str(reason)
    return error.strerror or str(error)


def _choices(model: NewModel) -> Choices:
    return Choices(
        names={name: model.name_of(name) for name in PRESETS[model.preset]},
        max_batch_size=model.max_batch_size or DEFAULT_MAX_BATCH_SIZE,
        is_decoupled=model.is_decoupled,
        parameters={**model.parameters, SERVED_NAME: model.name},
    )
