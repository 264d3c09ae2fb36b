"""Writes a copy of a checkpoint's directory with its linear layers rounded to nearest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from naiad.cli.checkpoints.complete_directory import MANIFEST
from naiad.cli.checkpoints.model_files import INDEX, weight_files
from naiad.cli.quantize.rounding import round_to_nearest
from naiad.cli.quantize.scheme import HEAD, Scheme
from naiad.errors import ModelError

_EMBEDDING = "model.embed_tokens"
_WEIGHT = ".weight"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_WRITTEN = ("config.json", INDEX, MANIFEST)


def copy_rounded(source: Path, target: Path, scheme: Scheme, say: Callable[[str], None]) -> None:
    """Fill a directory with the rounded checkpoint; a file of weights is held in memory at a time.

    Args:
        source: a checkpoint whose weights are not quantised.
        target: an empty directory.
        scheme: how linear layers are rounded; the head and embeddings are copied.
        say: called with a line for each file.

    Raises:
        ModelError: a weight is not finite, or a layer's inputs are no whole groups.
    """
    copy_other_files(source, target)
    files = weight_files(source)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, path in enumerate(files, 1):
        say(f"{path.name} ({number} of {len(files)})")
        tensors = _rounded_file(path, scheme)
        save_file(tensors, target / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if (source / INDEX).is_file():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = scheme.quantization_config
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def copy_other_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation settings where `target` has none of these names."""
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern)}):
        if path.is_file() and path.name not in _WRITTEN and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _rounded_file(path: Path, scheme: Scheme) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            tensor = file.get_tensor(name)
            layer = name.removesuffix(_WEIGHT)
            if layer == name or tensor.ndim != 2 or layer in (HEAD, _EMBEDDING):
                tensors[name] = tensor
                continue
            _check(f"{path.name}: tensor {name!r}", tensor, scheme)
            for part, stored in round_to_nearest(tensor, scheme).items():
                tensors[f"{layer}.{part}"] = stored
    return tensors


def _check(place: str, weight: torch.Tensor, scheme: Scheme) -> None:
    if not weight.is_floating_point() or not bool(weight.isfinite().all()):
        raise ModelError(f"{place} has a weight that is not a finite number")
    if scheme.bits == 4 and weight.shape[1] % scheme.group_size:
        raise ModelError(
            f"{place}: {weight.shape[1]} inputs are no whole groups of {scheme.group_size}: choose another "
            "--group-size, or --bits 8"
        )
