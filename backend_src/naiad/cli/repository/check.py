"""Checks, before anything starts, that this machine can serve the repository."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from naiad.cli.checkpoints.model_files import check_checkpoint, check_model_directory
from naiad.cli.plain_paths import PLAIN_CHARACTERS, is_plain
from naiad.cli.repository.model_entries import ModelEntry, with_parameters
from naiad.cli.repository.served_models import ServedModel, served_models
from naiad.cli.system_checks import check_memory
from naiad.config import EngineConfig, ModelConfig
from naiad.config.cores import core_ids, num_compute_threads, usable_cores
from naiad.config.model_location import path_of_text, text_of_path
from naiad.errors import ConfigError
from naiad.frontend.parameter_keys import parameter_keys, refuse_unknown_keys
from naiad.tokenization.chat_template import ChatTemplate
from naiad.tokenization.checkpoint_tokenizer import read_chat_template

# For the server, the stubs and the engine process, in addition to weights and cache.
_PROCESSES_BYTES = 1 << 30
# Of a weight of a projection, without its scales.
_ROUNDED_BYTES = {"int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a language model needs.

    Attributes:
        model: the language model.
        weight_bytes: size of the files of its checkpoint and of its draft model.
        kv_cache_bytes: size of its KV cache; 0: chosen at start.
        memory_bytes: minimum memory that it needs in all.
    """

    model: ServedModel
    weight_bytes: int
    kv_cache_bytes: int
    memory_bytes: int


def with_directories(entries: Sequence[ModelEntry], resolve: Callable[[str, str], Path]) -> list[ModelEntry]:
    """Return the models with `model_dir` and `draft_model` replaced by directories.

    Args:
        entries: the repository's models.
        resolve: returns the directory of a checkpoint, given its name and the key that names it.
    """
    names = {name for entry in entries for name in _model_names(entry).items()}
    directories = {(key, name): text_of_path(resolve(name, key), key) for key, name in sorted(names)}
    return [
        with_parameters(entry, {name[0]: directories[name] for name in _model_names(entry).items()})
        for entry in entries
    ]


def _model_names(entry: ModelEntry) -> dict[str, str]:
    """The parameters of a model that name checkpoints; none if the model is not Naiad's."""
    if not entry.is_ours:
        return {}
    names = {"model_dir": entry.parameters["model_dir"] or "default"}
    draft = entry.parameters.get("draft_model", "")
    return {**names, "draft_model": draft} if draft and not draft.startswith("${") else names


def check_repository(entries: Sequence[ModelEntry], available_bytes: int) -> list[Need]:
    """Check wiring, settings, checkpoints and memory.

    Args:
        entries: the repository's models, with their directories.
        available_bytes: memory that the machine has available.

    Returns:
        The needs of each language model.

    Raises:
        StartupError: a check fails; the message names the first fault found.
    """
    for entry in entries:
        if not is_plain(entry.name):
            raise ConfigError("the name of a model's directory", entry.name, PLAIN_CHARACTERS)
        if entry.kind is not None:
            refuse_unknown_keys(entry.parameters, parameter_keys(entry.kind), entry.name)
    needs = [_need(model) for model in served_models(entries)]
    if len(needs) > 1:
        _check_budgets_are_definite(needs)
    whose = "this model needs" if len(needs) == 1 else f"these {len(needs)} models need"
    check_memory(available_bytes, sum(need.memory_bytes for need in needs), whose)
    return needs


def warnings_of(models: Sequence[ServedModel]) -> list[str]:
    """Say what of the models will work badly, or not at all, although they can be served.

    Raises:
        StartupError: one of them can not be served.
    """
    return [*core_warnings(models), *filter(None, map(_template_warning, models))]


def _template_warning(model: ServedModel) -> str | None:
    source = read_chat_template(path_of_text(model.engine_config().model_dir))
    fault = ChatTemplate(source, {}).fault
    if fault is None:
        return None
    return f"the chat template of {model.name} does not compile, so chats are refused: {fault}"


def core_warnings(models: Sequence[ServedModel]) -> list[str]:
    """Say where engines that compute on CPUs have more threads than there are cores, or the same cores.

    Without `cpu_threads` and `cpu_affinity` an engine has a thread for each physical core.

    Raises:
        ConfigError: an engine by itself asks for more cores than this process may use, or for others.
    """
    configs = [model.engine_config() for model in models]
    configs = [config for config in configs if config.device == "cpu"]
    num_threads = sum(num_compute_threads(config.cpu_threads, config.cpu_affinity) for config in configs)
    if len(configs) < 2:
        return []
    warnings = []
    if num_threads > (num_cores := usable_cores()):
        warnings.append(
            f"the {len(configs)} engines compute with {num_threads} threads, and this process may use "
            f"{num_cores} physical cores: they slow each other down unless cpu_threads gives each its share"
        )
    ids = [each for config in configs for each in core_ids(config.cpu_affinity)]
    shared = sorted({each for each in ids if ids.count(each) > 1})
    if shared:
        names = ", ".join(map(str, shared))
        warnings.append(f"several engines' cpu_affinity names these cores: {names}")
    return warnings


def _need(model: ServedModel) -> Need:
    config = model.engine_config()
    kind = config.quantization
    for entry in model.others:
        directory = entry.parameters.get("model_dir", config.model_dir)
        if directory != config.model_dir:
            raise ConfigError(
                f"model_dir of {entry.name}", directory, f"{config.model_dir}, as {model.engine.name}"
            )
    weights = [_Weights(config.model_dir, check_model_directory(path_of_text(config.model_dir)), kind)]
    if config.draft_model:
        size, own = check_checkpoint(path_of_text(config.draft_model)), config.draft_quantization
        weights.append(_Weights(config.draft_model, size, kind if own == "auto" else own))
    weight_bytes = sum(each.stored_bytes for each in weights)
    return Need(model, weight_bytes, config.kv_cache_bytes, _memory_bytes(config, weights))


@dataclass(frozen=True, slots=True)
class _Weights:
    """A checkpoint: its directory, the size of its files, and how its weights are rounded at load."""

    directory: str
    stored_bytes: int
    quantization: str

    def least_bytes(self, dtype: str) -> int:
        """A lower bound of what the weights take on a CPU that computes in this dtype."""
        model = ModelConfig.from_directory(path_of_text(self.directory))
        if self.quantization != "none":
            # The head has a byte for each weight, and the embedding, which is not rounded, has two or four.
            ends_bytes = 3 * model.vocab_size * model.hidden_size
            return ends_bytes + int(model.num_projection_weights * _ROUNDED_BYTES[self.quantization])
        # Even when computing in float32, torch may keep the weights of a 16-bit checkpoint in 16 bits; with
        # "auto" those of a 32-bit one may be in 16 bits too.
        is_narrowed = model.dtype == "float32" and dtype != "float32"
        return self.stored_bytes // 2 if is_narrowed else self.stored_bytes


def _memory_bytes(config: EngineConfig, weights: Sequence[_Weights]) -> int:
    if config.device != "cpu":
        return _PROCESSES_BYTES
    weight_bytes = sum(each.least_bytes(config.dtype) for each in weights)
    return _PROCESSES_BYTES + config.kv_cache_bytes + weight_bytes


def _check_budgets_are_definite(needs: Sequence[Need]) -> None:
    """Refuse budgets chosen at start: engines that start together would all count the same free memory."""
    for need in needs:
        if not need.kv_cache_bytes:
            raise ConfigError(
                f"kv_cache_bytes of {need.model.engine.name}",
                0,
                f"a number of bytes: {len(needs)} engines share the machine, so each needs its own budget "
                "(--kv-cache-bytes, or the parameter in config.pbtxt)",
            )
