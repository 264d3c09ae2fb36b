"""Which keys the `parameters` of a model's config.pbtxt may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from naiad.errors import ConfigError
from naiad.frontend.model_configs import CONFIGURATIONS

# Keys of vLLM's backend, which are checked and have no effect.
VLLM_KEYS = ("REPORT_CUSTOM_METRICS", "ENABLE_VLLM_HEALTH_CHECK")
_TRITONS_KEYS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})


def parameter_keys(kind: str) -> tuple[str, ...]:
    """The keys of a model of this kind, which is the name of a shipped one, such as "llm"."""
    shipped = tuple(key for _, group in CONFIGURATIONS[kind].parameters for key in group)
    return (*shipped, *VLLM_KEYS) if kind == "vllm" else shipped


def refuse_unknown_keys(parameters: Mapping[str, str], known: Iterable[str], model: str = "") -> None:
    """Refuse unknown keys, so that a misspelt one is not ignored.

    Args:
        parameters: the model's parameters.
        known: the keys that it knows.
        model: its name, for a reader of the message who has several.

    Raises:
        ConfigError: a key is unknown; the message names it and the known keys.
    """
    known = tuple(known)
    for key, value in parameters.items():
        if key not in known and key not in _TRITONS_KEYS:
            name = f"{key} of {model}" if model else key
            raise ConfigError(name, value, f"one of the keys {', '.join(known)}")
