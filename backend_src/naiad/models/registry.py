"""Maps each family's configuration to its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from naiad.config import ModelConfig
from naiad.config.families.gemma import GemmaConfig
from naiad.config.families.llama import LlamaConfig
from naiad.models.decoder import DecoderModel
from naiad.models.gemma import GemmaModel
from naiad.models.llama import LlamaModel
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LoadOptions

_MODELS: dict[type[ModelConfig], Callable[[Any, Checkpoint], DecoderModel]] = {
    LlamaConfig: LlamaModel,
    GemmaConfig: GemmaModel,
}


def load_model(directory: str, config: ModelConfig, options: LoadOptions) -> DecoderModel:
    """Load a checkpoint.

    Args:
        directory: the checkpoint's directory.
        config: its configuration, as `ModelConfig.from_directory` reads it.
        options: dtype, device, and how linear layers are laid out.

    Raises:
        ModelError: names the file and the tensor that are missing, damaged or misshapen.
    """
    return _MODELS[type(config)](config, Checkpoint(directory, options))
