"""What the configuration of a model says of the requests that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Without these inputs and outputs a model is not Naiad's `ensemble` or `text`, by whatever name.
_INPUTS = frozenset(
    {
        *("text_input", "max_tokens", "end_id", "temperature", "top_p", "stream"),
        *("exclude_input_in_output", "return_finish_reason", "return_num_output_tokens"),
    }
)
_OUTPUTS = frozenset({"text_output", "finish_reason", "stop_reason", "num_output_tokens", "sequence_index"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The parts of the configuration of a model that requests depend on.

    Attributes:
        name: the model's name at its server.
        inputs: the names of its inputs.
        has_rows: its tensors have a batch dimension.
        adds_special_tokens, skips_special_tokens: how it turns prompts into tokens, and tokens into text.
        max_model_len: maximum number of tokens of a prompt and its output; 0 if it is not configured.
    """

    name: str
    inputs: frozenset[str]
    has_rows: bool
    adds_special_tokens: bool
    skips_special_tokens: bool
    max_model_len: int


class NoTextModelError(Exception):
    """The model is none that the server can offer; the message says why."""


def takes_text(config: Any) -> bool:
    """Whether a model takes and returns text.

    Args:
        config: Triton's `ModelConfig`.
    """
    return "text_input" in _names(config.input) and "text_output" in _names(config.output)


def models_behind(config: Any) -> list[str]:
    """The names of the models that this one uses: an ensemble's steps, or the one with the engine."""
    steps = [step.model_name for step in config.ensemble_scheduling.step]
    engine = config.parameters["llm_model_name"].string_value if "llm_model_name" in config.parameters else ""
    return [*steps, *([engine] if engine else [])]


def read_shape(config: Any, behind: Sequence[Any]) -> ModelShape:
    """Read the configuration of a model.

    Args:
        config: Triton's `ModelConfig`.
        behind: the configurations of `models_behind`.

    Raises:
        NoTextModelError: it lacks what the server needs.
    """
    missing = [f"no input {name}" for name in sorted(_INPUTS - _names(config.input))]
    missing += [f"no output {name}" for name in sorted(_OUTPUTS - _names(config.output))]
    if missing:
        raise NoTextModelError(f"it has {', '.join(missing)}")
    configs = [config, *behind]
    if not any(each.model_transaction_policy.decoupled for each in configs):
        raise NoTextModelError("it is not decoupled: it can not stream")
    if "true" in _values(configs, "accumulate_tokens"):
        raise NoTextModelError("its responses repeat the text before them (accumulate_tokens = true)")
    lengths = [int(each) for each in _values(configs, "max_model_len") if each.isdigit() and int(each)]
    return ModelShape(
        name=config.name,
        inputs=_names(config.input),
        has_rows=config.max_batch_size > 0,
        adds_special_tokens="false" not in _values(configs, "add_special_tokens"),
        skips_special_tokens="false" not in _values(configs, "skip_special_tokens"),
        max_model_len=min(lengths, default=0),
    )


def _names(tensors: Any) -> frozenset[str]:
    return frozenset(each.name for each in tensors)


def _values(configs: Sequence[Any], key: str) -> list[str]:
    return [each.parameters[key].string_value.strip().lower() for each in configs if key in each.parameters]
