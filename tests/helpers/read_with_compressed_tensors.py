"""Dequantises a checkpoint with compressed-tensors, in an environment that has it.

    python read_with_compressed_tensors.py DIR OUT.safetensors

DIR is of compressed-tensors' own formats, or AWQ, which its converter translates first.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file


def main(directory: Path, out: Path) -> None:
    """Write every quantised layer's weight in float32."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    tensors = load_file(directory / "model.safetensors")
    form = config.get("format", "pack-quantized")
    if config["quant_method"] == "awq":
        converter = AutoAWQConverter.from_autoawq_config(config)
        tensors = converter.process(tensors)
        described = converter.update_config(None)
    else:
        described = QuantizationConfig.model_validate(config)
    (scheme,) = described.config_groups.values()
    assert isinstance(scheme, QuantizationScheme)
    layers: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        # Scales in float32 make the product exact.
        is_float_scale = part == "weight_scale" and tensor.is_floating_point()
        layers[layer][part] = tensor.float() if is_float_scale else tensor
    found = {}
    for layer, parts in layers.items():
        if "weight_scale" in parts:
            compressor = BaseCompressor.get_value_from_registry(form)
            found[layer] = compressor.decompress(parts, scheme)["weight"].float().contiguous()
    save_file(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
