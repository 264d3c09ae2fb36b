"""How a checkpoint's weights are quantised: a typed description of `quantization_config`.

Each format has a file that reads its keys. A key is honoured, known to say nothing about the stored weights,
or refused by name. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

from naiad.config.checkpoint_json import Json, bad_value
from naiad.config.quantised import awq, compressed_tensors, fp8, gptq
from naiad.config.quantised.layers import LayerFormat, QuantisedWeights

__all__ = ["METHODS", "OLDER_FILES", "LayerFormat", "QuantisedWeights", "read_quantised_weights"]

_KEY = "quantization_config"
_READERS: dict[str, Callable[[Json], QuantisedWeights]] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
}
METHODS = tuple(_READERS)
# Method → the file beside config.json that has its keys in old checkpoints.
OLDER_FILES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}


def read_quantised_weights(config: Json) -> QuantisedWeights | None:
    """Read a checkpoint's `quantization_config`; None if its weights are not quantised.

    Args:
        config: the parsed config.json.

    Raises:
        ModelError: the method is not supported, or a key is missing, unknown or has an unsupported value.
    """
    source = config.get(_KEY)
    if source is None or source == {}:
        return None
    if not isinstance(source, dict):
        raise bad_value(_KEY, source, "an object")
    method = source.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise bad_value(f"{_KEY}.quant_method", method, f"one of {', '.join(METHODS)}, or no {_KEY}")
    return _READERS[method](source)
