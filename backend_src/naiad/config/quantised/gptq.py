"""Reads `quantization_config` of GPTQ checkpoints, as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from naiad.config.checkpoint_json import Json, is_int
from naiad.config.quantised.keys import CALIBRATION_KEYS, Keys
from naiad.config.quantised.layers import GPTQLayer
from naiad.config.quantised.patterns import check_pattern, matches

_PATH = "quantization_config"
_BITS = (2, 3, 4, 8)
_MAX_GROUP_SIZE = 1 << 20
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class GPTQWeights:
    """The layers of a GPTQ checkpoint.

    A layer that the configuration does not exclude may still be stored in full precision: no key lists
    the layers.

    Attributes:
        default: the format of layers without an override.
        has_head: whether the head is quantised.
        overrides: pattern → the format of the layers that it matches; None: full precision.
    """

    default: GPTQLayer
    has_head: bool
    overrides: tuple[tuple[str, GPTQLayer | None], ...]

    method = "gptq"
    unrounded = ()

    def layer(self, name: str) -> GPTQLayer | None:
        """How a layer is stored; see `QuantisedWeights.layer`."""
        for pattern, layer in self.overrides:
            if matches(f"{_PATH}.dynamic", pattern, name):
                return layer
        return self.default if self.has_head or name != _HEAD else None


def read(source: Json) -> GPTQWeights:
    """Read the keys.

    Raises:
        ModelError: a key is missing, unknown or has an unsupported value.
    """
    keys = Keys(source, _PATH)
    keys.must_be("quant_method", "gptq")
    keys.must_be("pack_dtype", "int32")
    keys.must_be("is_marlin_format", False)
    for key in ("adapter", "rotation", "sparsity"):
        keys.must_be(key)
    version = keys.first("checkpoint_format", "format", default="gptq")
    if version not in ("gptq", "gptq_v2"):
        raise keys.bad("checkpoint_format", version, "'gptq' or 'gptq_v2'")
    default = _with_settings(
        keys,
        GPTQLayer(
            bits=0, group_size=128, is_symmetric=True, adds_one=version == "gptq", needs_group_ids=False
        ),
    )
    has_head = keys.flag(_HEAD)
    overrides = _overrides(keys, default)
    keys.skip(CALIBRATION_KEYS)
    keys.finish()
    return GPTQWeights(default, has_head, overrides)


def _with_settings(keys: Keys, base: GPTQLayer) -> GPTQLayer:
    bits = keys.integer("bits", _BITS, base.bits or None)
    group_size = keys.take("group_size", base.group_size)
    if not is_int(group_size) or not (group_size == -1 or 1 <= group_size <= _MAX_GROUP_SIZE):
        raise keys.bad("group_size", group_size, f"−1 or 1 … {_MAX_GROUP_SIZE}")
    return replace(
        base,
        bits=bits,
        group_size=group_size,
        is_symmetric=keys.flag("sym", base.is_symmetric),
        needs_group_ids=keys.flag("desc_act", base.needs_group_ids),
    )


def _overrides(keys: Keys, default: GPTQLayer) -> tuple[tuple[str, GPTQLayer | None], ...]:
    source = keys.take("dynamic", {})
    if not isinstance(source, dict):
        raise keys.bad("dynamic", source, "an object")
    overrides: list[tuple[str, GPTQLayer | None]] = []
    for key, settings in source.items():
        path = f"{keys.path}.dynamic"
        pattern = key.removeprefix("-:").removeprefix("+:")
        check_pattern(path, pattern)
        if key.startswith("-:"):
            overrides.append((pattern, None))
            continue
        more = Keys(settings, f"{path}.{key}")
        overrides.append((pattern, _with_settings(more, default)))
        more.skip(CALIBRATION_KEYS)
        more.finish()
    return tuple(overrides)
