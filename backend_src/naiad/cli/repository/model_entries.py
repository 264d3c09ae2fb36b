"""Model repositories: reads their config.pbtxt files, and writes copies with other parameters."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import naiad
from naiad.config.engine_config import field_names
from naiad.errors import ConfigError, StartupError

CONFIG_NAME = "config.pbtxt"
_MODEL_DIR = "model_dir"
# A parameter that only the `llm` model has, whatever its name is.
_ENGINE_MARK = "max_num_seqs"
# An input that each kind of model has beside the engine's → the kind.
_KINDS = {"QUERY": "tokenizer", "stop": "text", "sampling_parameters": "vllm", "TOKENS_BATCH": "detokenizer"}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the repository.

    Attributes:
        name: name of its directory.
        config: `model_config_pb2.ModelConfig`; None if there is no config.pbtxt.
        parameters: the parameters in config.pbtxt.
        input_names: the names of the inputs in config.pbtxt.
    """

    name: str
    config: Any
    parameters: Mapping[str, str]
    input_names: frozenset[str]

    @property
    def is_ours(self) -> bool:
        """Whether it is one of Naiad's models."""
        return _MODEL_DIR in self.parameters

    @property
    def kind(self) -> str | None:
        """The name of the shipped model of its kind, such as "llm"; None: it is not one of Naiad's."""
        if not self.is_ours:
            return None
        if self.is_engine:
            return "llm"
        return next((kind for name, kind in _KINDS.items() if name in self.input_names), None)

    @property
    def is_engine(self) -> bool:
        """Whether it runs the engine."""
        return self.is_ours and _ENGINE_MARK in self.parameters


def find_repository(directory: Path | None, name: str = "--model-repository") -> Path:
    """Return the repository in this directory, or else the one in the package.

    Args:
        directory: as the user gave it; None: the user gave none.
        name: what the command line calls it.

    Raises:
        StartupError: there is none.
    """
    if directory is not None:
        if not directory.is_dir():
            raise ConfigError(name, str(directory), "an existing directory")
        return directory.resolve()
    packaged = (Path(naiad.__file__).parent / "model_repository").resolve()
    if not packaged.is_dir():
        raise StartupError(
            "the package has no model repository: install it again, or name one with --model-repository DIR"
        )
    return packaged


def read_repository(source: Path) -> list[ModelEntry]:
    """Return all models, sorted by name.

    Raises:
        StartupError: none of them is Naiad's, or a config.pbtxt cannot be parsed.
    """
    entries = [read_model(path) for path in sorted(source.iterdir()) if path.is_dir()]
    if not any(entry.is_engine for entry in entries):
        raise StartupError(
            f"{source} holds no model of Naiad: expected one whose config.pbtxt has the parameters "
            f"{_MODEL_DIR} and {_ENGINE_MARK}"
        )
    return entries


def read_model(path: Path) -> ModelEntry:
    """Return the model in this directory.

    Raises:
        StartupError: its config.pbtxt cannot be parsed, or is not UTF-8.
    """
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config_path = path / CONFIG_NAME
    if not config_path.is_file():
        return ModelEntry(path.name, None, {}, frozenset())
    try:
        config = text_format.Parse(config_path.read_text(encoding="utf-8"), ModelConfig())
    except text_format.ParseError as error:
        raise StartupError(f"{config_path} can not be parsed: {error}") from None
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        text = f"line {line} of {config_path} is not UTF-8; if it names a directory, rename that"
        raise StartupError(text) from None
    return model_entry(path.name, config)


def model_entry(name: str, config: Any) -> ModelEntry:
    """Make the entry of a model from its configuration, a `model_config_pb2.ModelConfig`."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    return ModelEntry(name, config, parameters, frozenset(each.name for each in config.input))


def with_parameters(entry: ModelEntry, overrides: Mapping[str, str]) -> ModelEntry:
    """Return the model with new values of its parameters, if it is one of Naiad's.

    A model that runs the engine takes every setting of the engine, also one that its config.pbtxt leaves out;
    others take what they have.
    """
    known = {*entry.parameters, *(field_names() if entry.is_engine else ())}
    chosen = {key: text for key, text in overrides.items() if key in known}
    if not entry.is_ours or not chosen:
        return entry
    config = type(entry.config)()
    config.CopyFrom(entry.config)
    for key, text in chosen.items():
        config.parameters[key].string_value = text
    return replace(entry, config=config, parameters={**entry.parameters, **chosen})


def write_model(source: Path, target: Path, config_text: str) -> None:
    """Copy a model's directory with another configuration.

    Args:
        source: the model's directory.
        target: the directory to create.
        config_text: the new configuration, as its config.pbtxt holds it.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    (target / CONFIG_NAME).write_text(config_text, encoding="utf-8")
