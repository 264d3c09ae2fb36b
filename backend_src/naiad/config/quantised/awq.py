"""Reads `quantization_config` of AWQ checkpoints, as AutoAWQ and transformers write them."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.config.checkpoint_json import Json, is_int
from naiad.config.quantised.keys import CALIBRATION_KEYS, Keys
from naiad.config.quantised.layers import AWQLayer, names_layer

_PATH = "quantization_config"
_MAX_GROUP_SIZE = 1 << 20
# Of AWQ alone. Whether there are zero points is what zero_point says, whatever sym does.
_SILENT_KEYS = (
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "pre_quantized", "duo_scaling", "sym"),
    *("n_parallel_calib_samples", "max_calib_samples", "max_calib_seq_len"),
)


@dataclass(frozen=True, slots=True)
class AWQWeights:
    """The layers of an AWQ checkpoint.

    A layer that the configuration does not exclude may still be stored in full precision: no key lists
    the layers.

    Attributes:
        default: the format of all layers.
        excluded: parts of the names of layers in full precision.
    """

    default: AWQLayer
    excluded: tuple[str, ...]

    method = "awq"
    unrounded = ()

    def layer(self, name: str) -> AWQLayer | None:
        """How a layer is stored; see `QuantisedWeights.layer`."""
        return None if any(names_layer(part, name) for part in self.excluded) else self.default


def read(source: Json) -> AWQWeights:
    """Read the keys.

    Raises:
        ModelError: a key is missing, unknown or has an unsupported value.
    """
    keys = Keys(source, _PATH)
    keys.must_be("quant_method", "awq")
    bits = keys.first("bits", "w_bit")
    if not is_int(bits) or bits != 4:
        raise keys.bad("bits", bits, "4")
    group_size = keys.first("group_size", "q_group_size", default=128)
    if not is_int(group_size) or not (group_size == -1 or 1 <= group_size <= _MAX_GROUP_SIZE):
        raise keys.bad("group_size", group_size, f"−1 or 1 … {_MAX_GROUP_SIZE}")
    for name in ("version", "format", "checkpoint_format"):
        order = keys.take(name, "gemm")
        if not isinstance(order, str) or order.lower() != "gemm":
            raise keys.bad(name, order, "'gemm'")
    # AutoAWQ's gemm layers have zero points in any case.
    keys.must_be("zero_point", True)
    keys.must_be("desc_act", False)
    excluded = keys.texts("modules_to_not_convert")
    keys.skip((*CALIBRATION_KEYS, *_SILENT_KEYS))
    keys.finish()
    return AWQWeights(AWQLayer(group_size=group_size), excluded)
