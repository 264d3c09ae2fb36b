"""Chooses the model that drafts, and refuses unsuitable ones before any weights are loaded."""

from __future__ import annotations

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError

# The better of those that need no model (docs/performance.md).
_NATIVE_DRAFTER = "suffix"
# By default the target's layers divided by this number draft.
_LAYERS_SHARE = 4


def chosen_drafter(config: EngineConfig, is_native: bool) -> str:
    """Return where draft tokens come from.

    Args:
        config: the engine's configuration.
        is_native: whether native kernels compute the steps. A row's logits are then bitwise the same with
            and without drafts, so by default there are drafts.
    """
    if config.drafter != "auto":
        return config.drafter
    return _NATIVE_DRAFTER if is_native else "none"


def draft_model_config(config: EngineConfig, target: ModelConfig) -> ModelConfig | None:
    """Return the configuration of the draft model's checkpoint; None: there is no draft model.

    Raises:
        ConfigError: its vocabulary is not the target's, or its maximum context is shorter than the
            served one.
        ModelError: the checkpoint is missing or not supported.
    """
    if config.drafter != "draft_model":
        return None
    draft = ModelConfig.from_directory(config.draft_model)
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            "draft_model",
            config.draft_model,
            f"a model of the vocabulary of {config.model_dir}: that has {target.vocab_size} ids, "
            f"this one {draft.vocab_size}",
        )
    limit = target.max_position_embeddings
    num_needed = min(config.max_model_len or limit, limit)
    if draft.max_position_embeddings < num_needed:
        raise ConfigError(
            "draft_model",
            config.draft_model,
            f"a model for {num_needed} tokens of context: this one is for {draft.max_position_embeddings}; "
            f"choose another, or max_model_len = {draft.max_position_embeddings}",
        )
    return draft


def quantizations(config: EngineConfig) -> list[str]:
    """Return how the served model's weights are rounded, and then those of a draft model if there is one."""
    kinds = [config.quantization]
    if config.drafter == "draft_model":
        is_the_targets = config.draft_quantization == "auto"
        kinds.append(config.quantization if is_the_targets else config.draft_quantization)
    return kinds


def num_draft_layers(config: EngineConfig, target: ModelConfig) -> int:
    """Return how many of the target's first layers draft; 0: none.

    Raises:
        ConfigError: `num_draft_layers` exceeds the target's layers.
    """
    if config.drafter != "self":
        return 0
    if config.num_draft_layers > target.num_layers:
        raise ConfigError(
            "num_draft_layers",
            config.num_draft_layers,
            f"0 (a quarter of them) or 1 … {target.num_layers}, the layers of {config.model_dir}",
        )
    return config.num_draft_layers or max(1, target.num_layers // _LAYERS_SHARE)
