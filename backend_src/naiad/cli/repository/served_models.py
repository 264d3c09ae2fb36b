"""The language models of a repository: each consists of an `llm` model and the models that use its engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from naiad.cli.repository.model_entries import ModelEntry
from naiad.config import EngineConfig
from naiad.config.engine_config import field_names
from naiad.errors import ConfigError, StartupError
from naiad.frontend.parameter_keys import parameter_keys, refuse_unknown_keys

SERVED_NAME = "served_name"
LLM_NAME = "llm_model_name"
# The name is part of directory names, metric labels and socket paths, whose length is limited.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A language model of the repository.

    Attributes:
        engine: its `llm` model, which owns the engine.
        others: its tokenizer, detokenizer and ensemble, and further frontends of its engine.
    """

    engine: ModelEntry
    others: tuple[ModelEntry, ...]

    @property
    def name(self) -> str:
        """Its name in `naiad repository`."""
        return self.engine.parameters.get(SERVED_NAME) or self.engine.name

    @property
    def is_added(self) -> bool:
        """Whether it was added to a repository: its models' names begin with its own."""
        return self.engine.name.startswith(f"{self.name}_")

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """All its models."""
        return (self.engine, *self.others)

    @property
    def entry_point(self) -> ModelEntry:
        """The model that clients should use: an ensemble, else one that takes text, else the `llm` model."""
        by_text = [each for each in self.others if "text_input" in each.input_names]
        return next((each for each in by_text if steps(each)), (by_text or [self.engine])[0])

    def engine_config(self) -> EngineConfig:
        """The engine's configuration.

        Raises:
            ConfigError: a parameter is unknown, or has a value that is not allowed.
        """
        refuse_unknown_keys(self.engine.parameters, parameter_keys("llm"), self.engine.name)
        known = {key: value for key, value in self.engine.parameters.items() if key in field_names()}
        return EngineConfig.from_parameters(known)


def served_models(entries: Sequence[ModelEntry]) -> list[ServedModel]:
    """Group a repository's models into language models: the first one, then those that were added, by name.

    Raises:
        StartupError: a model names another one that is missing.
        ConfigError: two language models have the same name.
    """
    by_name = {entry.name: entry for entry in entries}
    _check_wiring(by_name)
    models = [ServedModel(entry, _around(entry, by_name)) for entry in entries if entry.is_engine]
    models.sort(key=lambda model: (model.is_added, model.engine.name))
    names = [model.name for model in models]
    for model in models:
        if names.count(model.name) > 1:
            raise ConfigError(f"{SERVED_NAME} of {model.engine.name}", model.name, "a name of its own")
    return models


def check_name(name: str) -> None:
    """Raise a ConfigError if the name of a language model is not allowed."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "--name", name, "up to 40 letters, digits, '_', '.' and '-', a letter or digit first"
        )


def top_models(entries: Sequence[ModelEntry]) -> list[str]:
    """Return the models that are not steps of an ensemble.

    The server loads an ensemble's steps with it, and unloads them with it unless they were loaded by
    name.
    """
    joined = {name for entry in entries for name in steps(entry)}
    return [entry.name for entry in entries if entry.name not in joined]


def steps(entry: ModelEntry) -> list[str]:
    """The models that an ensemble consists of; empty for other models."""
    if entry.config is None:
        return []
    return [step.model_name for step in entry.config.ensemble_scheduling.step]


def _around(engine: ModelEntry, by_name: dict[str, ModelEntry]) -> tuple[ModelEntry, ...]:
    ensembles = [entry for entry in by_name.values() if engine.name in steps(entry)]
    joined = {name for entry in ensembles for name in steps(entry)}
    return tuple(
        entry
        for entry in by_name.values()
        if entry is not engine
        and (
            entry in ensembles
            or (entry.is_ours and entry.name in joined)
            or entry.parameters.get(LLM_NAME) == engine.name
        )
    )


def _check_wiring(by_name: dict[str, ModelEntry]) -> None:
    for entry in by_name.values():
        named = [*steps(entry), *filter(None, [entry.parameters.get(LLM_NAME)])]
        for name in named:
            if name not in by_name:
                raise StartupError(f"the model {entry.name} names the model {name}, which is not there")
