"""Which models of a repository belong together: a language model is an engine and what is around it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from naiad.cli.repository.model_entries import ModelEntry
from naiad.config import EngineConfig
from naiad.config.engine_config import field_names
from naiad.errors import ConfigError, StartupError

SERVED_NAME = "served_name"
LLM_NAME = "llm_model_name"
# Part of directory names, metric labels, and of sockets' paths, which are short.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A language model of the repository.

    Attributes:
        engine: its `llm`.
        others: its tokenizer, its detokenizer, its ensemble, and further doors to its engine.
    """

    engine: ModelEntry
    others: tuple[ModelEntry, ...]

    @property
    def name(self) -> str:
        """What `naiad repository` calls it."""
        return self.engine.parameters.get(SERVED_NAME) or self.engine.name

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """All its models."""
        return (self.engine, *self.others)

    @property
    def entry_point(self) -> ModelEntry:
        """Whom clients ask: the ensemble, or else another model that takes text, or the engine's."""
        by_text = [each for each in self.others if "text_input" in each.input_names]
        return next((each for each in by_text if steps(each)), (by_text or [self.engine])[0])

    def engine_config(self) -> EngineConfig:
        """The engine's configuration.

        Raises:
            ConfigError: a parameter has a value that is not allowed.
        """
        known = {key: value for key, value in self.engine.parameters.items() if key in field_names()}
        return EngineConfig.from_parameters(known)


def served_models(entries: Sequence[ModelEntry]) -> list[ServedModel]:
    """The language models, by the names of their engines.

    Raises:
        StartupError: a step or an engine that a model names is not there.
        ConfigError: two have the same name.
    """
    by_name = {entry.name: entry for entry in entries}
    _check_wiring(by_name)
    models = [ServedModel(entry, _around(entry, by_name)) for entry in entries if entry.is_engine]
    names = [model.name for model in models]
    for model in models:
        if names.count(model.name) > 1:
            raise ConfigError(f"{SERVED_NAME} of {model.engine.name}", model.name, "a name of its own")
    return models


def check_name(name: str) -> None:
    """Raise a ConfigError if a language model can not have this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "--name", name, "up to 40 letters, digits, '_', '.' and '-', a letter or digit first"
        )


def top_models(entries: Sequence[ModelEntry]) -> list[str]:
    """The models that are no steps of others: with an ensemble the server loads its steps.

    It unloads them with it too, unless they were asked for by name.
    """
    joined = {name for entry in entries for name in steps(entry)}
    return [entry.name for entry in entries if entry.name not in joined]


def steps(entry: ModelEntry) -> list[str]:
    """The models that an ensemble joins; of others none."""
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
