"""The families of models: what each reads from config.json, and the registry of architectures.

A family refuses settings that its forward pass in `naiad.models` does not implement. Nothing here imports
torch, because the tokenizer's process and the command line also read configurations.
"""

from __future__ import annotations

from collections.abc import Callable

from naiad.config.checkpoint_json import Json, bad_value
from naiad.config.families import gemma, llama
from naiad.config.model_config import ModelConfig

__all__ = ["ARCHITECTURES", "read_model_config"]

_READERS: dict[str, Callable[[Json, Json], ModelConfig]] = {
    architecture: family.read_config for family in (llama, gemma) for architecture in family.ARCHITECTURES
}
ARCHITECTURES = tuple(_READERS)
_NON_TEXT_KEYS = ("vision_config", "audio_config", "text_config")


def read_model_config(config: Json, generation: Json) -> ModelConfig:
    """Read the configuration with the family that has its architecture.

    Args:
        config: the parsed config.json.
        generation: the parsed generation_config.json, or empty.

    Raises:
        ModelError: no family has the architecture, or a key is missing or has a value that the family does
            not support.
    """
    names = config.get("architectures")
    expected = f"one of {', '.join(ARCHITECTURES)}"
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name in _READERS:
        return _READERS[name](config, generation)
    if any(key in config for key in _NON_TEXT_KEYS):
        raise bad_value(
            "architectures", names, f"a checkpoint for text alone, without images or audio: {expected}"
        )
    raise bad_value("architectures", names, expected)
