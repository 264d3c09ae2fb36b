"""Reads `quantization_config` of checkpoints of compressed-tensors, as llm-compressor writes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from naiad.config.checkpoint_json import Json, is_int
from naiad.config.quantised.keys import Keys
from naiad.config.quantised.layers import LayerFormat, MXFP4Layer, PackedLayer, ScaledLayer, Scales
from naiad.config.quantised.patterns import check_pattern, matches

_PATH = "quantization_config"
_PACKED, _MXFP4 = "pack-quantized", "mxfp4-pack-quantized"
_SCALED = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (_PACKED, *_SCALED, _MXFP4)
_MIXED = "mixed-precision"
_LINEAR = "Linear"
_REGEX = "re:"
_MAX_SIZE = 1 << 20
_STRATEGIES = ("tensor", "channel", "group", "block")
# How scales were found, and dtypes that the tensors have anyway.
_SILENT_WEIGHT_KEYS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_SILENT_KEYS = ("global_compression_ratio", "version")


@dataclass(frozen=True, slots=True)
class CompressedTensorsWeights:
    """The layers of such a checkpoint.

    Attributes:
        targets: names, patterns that begin with "re:", or the class "Linear" → a format, in order of
            precedence; None: full precision.
        ignored: names, patterns and classes of layers in full precision.
        unrounded: see `QuantisedWeights`.
    """

    targets: tuple[tuple[str, LayerFormat | None], ...]
    ignored: tuple[str, ...]
    unrounded: tuple[str, ...]

    method = "compressed-tensors"

    def layer(self, name: str) -> LayerFormat | None:
        """How a layer is stored; see `QuantisedWeights.layer`."""
        if any(_is_about(f"{_PATH}.ignore", each, name) for each in self.ignored):
            return None
        for target, layer in self.targets:
            if _is_about(f"{_PATH}.config_groups", target, name):
                return layer
        return None


def read(source: Json) -> CompressedTensorsWeights:
    """Read the keys.

    Raises:
        ModelError: a key is missing, unknown or has an unsupported value.
    """
    keys = Keys(source, _PATH)
    keys.must_be("quant_method", "compressed-tensors")
    keys.must_be("quantization_status", "compressed")
    _refuse_transforms(keys)
    default = keys.choice("format", (*_FORMATS, _MIXED))
    ignored = keys.texts("ignore")
    for each in ignored:
        _check_target(f"{_PATH}.ignore", each)
    unrounded: list[str] = []
    if keys.take("kv_cache_scheme") is not None:
        unrounded.append("the KV cache")
    groups = keys.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise keys.bad("config_groups", groups, "an object with groups")
    targets: list[tuple[str, LayerFormat | None]] = []
    for name, group in groups.items():
        targets += _read_group(Keys(group, f"{_PATH}.config_groups.{name}"), default, unrounded)
    keys.skip(_SILENT_KEYS)
    keys.finish()
    # Names come before patterns, and patterns before classes.
    targets.sort(key=lambda each: (each[0] == _LINEAR, each[0].startswith(_REGEX)))
    return CompressedTensorsWeights(tuple(targets), ignored, tuple(dict.fromkeys(unrounded)))


def _refuse_transforms(keys: Keys) -> None:
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        value = keys.take(key)
        is_dense = isinstance(value, dict) and value.get("format") == "dense"
        if value and not is_dense:
            raise keys.bad(key, value, "null: only dense weights without transforms are read")


def _read_group(keys: Keys, default: str, unrounded: list[str]) -> list[tuple[str, LayerFormat | None]]:
    targets = keys.texts("targets")
    for each in targets:
        _check_target(f"{keys.path}.targets", each)
    allowed = _FORMATS if default == _MIXED else (*_FORMATS, default)
    form = keys.choice("format", allowed, None if default == _MIXED else default)
    inputs = keys.take("input_activations")
    outputs = keys.take("output_activations")
    for key, what, activations in (
        ("input_activations", "inputs", inputs),
        ("output_activations", "outputs", outputs),
    ):
        if activations is not None:
            unrounded.append(f"{what} of linear layers ({_activations(keys, key, activations)})")
    weights = keys.take("weights")
    keys.finish()
    layer = None if weights is None else _read_weights(Keys(weights, f"{keys.path}.weights"), form)
    if isinstance(layer, ScaledLayer) and inputs is not None:
        layer = replace(layer, rounds_inputs=_are_rounded_alike(inputs, layer.is_float))
    return [(each, layer) for each in targets]


def _activations(keys: Keys, key: str, source: object) -> str:
    more = Keys(source, f"{keys.path}.{key}")
    bits = more.integer("num_bits", range(1, 17), 8)
    kind = more.choice("type", ("int", "float"), "int")
    strategy = more.choice("strategy", (*_STRATEGIES, "token", "tensor_group", "attn_head"), "tensor")
    return f"{kind}{bits} per {strategy}"


def _are_rounded_alike(inputs: Json, is_float: bool) -> bool:
    """Whether inputs are rounded as the weights are; whole numbers only with a scale for each token."""
    if inputs.get("num_bits", 8) != 8 or inputs.get("type", "int") != ("float" if is_float else "int"):
        return False
    is_of_token = inputs.get("strategy") == "token" and inputs.get("dynamic") is True
    return is_float or (is_of_token and inputs.get("symmetric", True) is True)


def _read_weights(keys: Keys, form: str) -> LayerFormat:
    kind = keys.choice("type", ("int", "float"), "int")
    bits = keys.integer("num_bits", range(1, 9), 8)
    is_symmetric = keys.flag("symmetric", True)
    keys.must_be("dynamic", False)
    scales = _scales(keys)
    order = keys.take("actorder", False)
    if order not in (False, "weight", "static", "group", "dynamic"):
        raise keys.bad("actorder", order, "null, 'weight', 'static', 'group' or 'dynamic'")
    keys.skip(_SILENT_WEIGHT_KEYS)
    keys.finish()
    if form == _MXFP4:
        if (kind, bits, scales.strategy, scales.group_size) != ("float", 4, "group", 32) or not is_symmetric:
            raise keys.bad("num_bits", bits, "float weights of 4 bits in symmetric groups of 32")
        return MXFP4Layer()
    if form == _PACKED:
        if kind != "int" or scales.strategy == "block":
            raise keys.bad("type", kind, f"'int' weights, without blocks, for the format {form!r}")
        has_group_ids = order in ("group", "dynamic")
        return PackedLayer(bits=bits, is_symmetric=is_symmetric, scales=scales, has_group_ids=has_group_ids)
    return _scaled_layer(keys, form, kind, bits, is_symmetric, scales)


def _scaled_layer(
    keys: Keys, form: str, kind: str, bits: int, is_symmetric: bool, scales: Scales
) -> ScaledLayer:
    if form != "naive-quantized" and not form.startswith(kind):
        raise keys.bad("type", kind, f"the type of the format {form!r}")
    if kind == "float" and (bits != 8 or not is_symmetric):
        raise keys.bad("num_bits", bits, "symmetric floats of 8 bits")
    return ScaledLayer(
        is_float=kind == "float",
        bits=bits,
        is_symmetric=is_symmetric,
        scales=scales,
        scale_names=("weight_scale",),
        may_be_plain=False,
        rounds_inputs=False,
    )


def _scales(keys: Keys) -> Scales:
    size, block = keys.take("group_size"), keys.take("block_structure")
    if size is not None and (not is_int(size) or not (size == -1 or 1 <= size <= _MAX_SIZE)):
        raise keys.bad("group_size", size, f"−1 or 1 … {_MAX_SIZE}")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = keys.choice("strategy", _STRATEGIES, implied)
    if (strategy == "group") != (size is not None and size > 0):
        raise keys.bad("group_size", size, "a size with the strategy 'group', and only with it")
    if (strategy == "block") != (block is not None):
        raise keys.bad("block_structure", block, "two sizes with the strategy 'block', and only with it")
    if block is None:
        return Scales(strategy=strategy, group_size=size if strategy == "group" else 0)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(is_int(each) and 1 <= each <= _MAX_SIZE for each in block):
        raise keys.bad("block_structure", block, f"two numbers in 1 … {_MAX_SIZE}")
    return Scales(strategy=strategy, block=(block[0], block[1]))


def _check_target(key: str, target: str) -> None:
    if target.startswith(_REGEX):
        check_pattern(key, target.removeprefix(_REGEX))


def _is_about(key: str, target: str, name: str) -> bool:
    if target.startswith(_REGEX):
        return matches(key, target.removeprefix(_REGEX), name)
    return target in (name, _LINEAR)
