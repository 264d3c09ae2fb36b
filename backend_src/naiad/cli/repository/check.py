"""Can this machine serve the repository? Checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from naiad.cli.checkpoints.model_files import check_checkpoint, check_model_directory
from naiad.cli.repository.model_entries import ModelEntry, with_parameters
from naiad.cli.repository.served_models import ServedModel, served_models
from naiad.cli.system_checks import check_memory
from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError

# Server, stubs and the engine's own, beside weights and cache.
_PROCESSES_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """What a language model needs of the machine.

    Attributes:
        model: whose.
        weight_bytes: of the checkpoint's files, and of its draft model's.
        kv_cache_bytes: its budget; 0: chosen at start.
        memory_bytes: of the machine's memory in all, at least.
    """

    model: ServedModel
    weight_bytes: int
    kv_cache_bytes: int
    memory_bytes: int


def with_directories(entries: Sequence[ModelEntry], resolve: Callable[[str, str], Path]) -> list[ModelEntry]:
    """The models with the directories that each one's `model_dir` and `draft_model` stand for.

    Args:
        entries: of the repository.
        resolve: a model's name and the key that names it → its directory.
    """
    names = {name for entry in entries for name in _model_names(entry).items()}
    directories = {(key, name): str(resolve(name, key)) for key, name in sorted(names)}
    return [
        with_parameters(entry, {name[0]: directories[name] for name in _model_names(entry).items()})
        for entry in entries
    ]


def _model_names(entry: ModelEntry) -> dict[str, str]:
    """The keys of a model of ours that name checkpoints, and the names."""
    if not entry.is_ours:
        return {}
    names = {"model_dir": entry.parameters["model_dir"] or "default"}
    draft = entry.parameters.get("draft_model", "")
    return {**names, "draft_model": draft} if draft and not draft.startswith("${") else names


def check_repository(entries: Sequence[ModelEntry], available_bytes: int) -> list[Need]:
    """Check wiring, settings, checkpoints and memory.

    Args:
        entries: of the repository, their directories resolved.
        available_bytes: of the machine's memory.

    Returns:
        What each language model needs.

    Raises:
        StartupError: the first thing that is wrong.
    """
    needs = [_need(model) for model in served_models(entries)]
    if len(needs) > 1:
        _check_budgets_are_definite(needs)
    whose = "this model needs" if len(needs) == 1 else f"these {len(needs)} models need"
    check_memory(available_bytes, sum(need.memory_bytes for need in needs), whose)
    return needs


def _need(model: ServedModel) -> Need:
    config = model.engine_config()
    for entry in model.others:
        directory = entry.parameters.get("model_dir", config.model_dir)
        if directory != config.model_dir:
            raise ConfigError(
                f"model_dir of {entry.name}", directory, f"{config.model_dir}, as {model.engine.name}"
            )
    weights = [(config.model_dir, check_model_directory(Path(config.model_dir)))]
    if config.draft_model:
        weights.append((config.draft_model, check_checkpoint(Path(config.draft_model))))
    weight_bytes = sum(num_bytes for _, num_bytes in weights)
    return Need(model, weight_bytes, config.kv_cache_bytes, _memory_bytes(config, weights))


def _memory_bytes(config: EngineConfig, weights: Sequence[tuple[str, int]]) -> int:
    if config.device != "cpu":
        return _PROCESSES_BYTES
    needed_bytes = _PROCESSES_BYTES + config.kv_cache_bytes
    for directory, weight_bytes in weights:
        # At least: float32 weights of a 16-bit checkpoint stay in 16 bits where torch can do it.
        is_stored_wide = ModelConfig.from_directory(directory).dtype == "float32"
        factor = 0.5 if is_stored_wide and config.dtype not in ("auto", "float32") else 1
        needed_bytes += int(weight_bytes * factor)
    return needed_bytes


def _check_budgets_are_definite(needs: Sequence[Need]) -> None:
    """Engines that start side by side would each take their share of the same free memory."""
    for need in needs:
        if not need.kv_cache_bytes:
            raise ConfigError(
                f"kv_cache_bytes of {need.model.engine.name}",
                0,
                f"a number of bytes: {len(needs)} engines share the machine, so each needs its own budget "
                "(--kv-cache-bytes, or the parameter in config.pbtxt)",
            )
