"""Frozen, validated configuration: `EngineConfig` (ours) and `ModelConfig` (the checkpoint's)."""

from naiad.config.attention import AttentionSpec, LayerGroup
from naiad.config.engine_config import EngineConfig
from naiad.config.model_config import ModelConfig

__all__ = ["AttentionSpec", "EngineConfig", "LayerGroup", "ModelConfig"]
