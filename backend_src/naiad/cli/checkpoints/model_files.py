"""Checks that a model directory holds a complete, supported checkpoint; reads only headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from naiad.config import ModelConfig
from naiad.config.checkpoint_json import parse_json
from naiad.errors import ModelError
from naiad.tokenization.checkpoint_tokenizer import CheckpointTokenizer

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
INDEX = "model.safetensors.index.json"


def check_model_directory(directory: Path) -> int:
    """Check config.json, the tokenizer and every safetensors file; or a GGUF file.

    Returns:
        The size of all weights in bytes.

    Raises:
        ModelError: something is missing, damaged or not supported.
    """
    num_bytes = check_checkpoint(directory)
    if directory.is_file():
        CheckpointTokenizer.load(directory)
        return num_bytes
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json: save the tokenizer there with transformers' save_pretrained"
        )
    return num_bytes


def check_checkpoint(directory: Path) -> int:
    """Check what `check_model_directory` checks, except the tokenizer."""
    if directory.is_file():
        ModelConfig.from_directory(directory)
        return directory.stat().st_size
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory: expected a model directory")
    ModelConfig.from_directory(directory)
    return sum(check_safetensors(path) for path in weight_files(directory))


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files: those that its index names, or all if it has no index.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(_read_index(index).values()))
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ModelError(
            f"{directory} has no weights (*.safetensors): download them, or convert the checkpoint with "
            "transformers' save_pretrained"
        )
    for name in names:
        if not (directory / name).is_file():
            raise ModelError(f"{directory / name} is missing, {INDEX} names it: download the model again")
    return [directory / name for name in names]


def check_safetensors(path: Path) -> int:
    """Check that the file is as long as its header says.

    Returns:
        Its size in bytes.

    Raises:
        ModelError: the file is truncated or damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or header_bytes > size - _LENGTH_BYTES:
            raise _damaged(path, f"it is truncated: {size} bytes, shorter than its header")
        if header_bytes > _MAX_HEADER_BYTES:
            raise _damaged(path, "it is not a safetensors file")
        try:
            header = parse_json(file.read(header_bytes))
            end = max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError):
            raise _damaged(path, "its header can not be read") from None
    expected = _LENGTH_BYTES + header_bytes + end
    if size != expected:
        raise _damaged(path, f"it is truncated: {size} of {expected} bytes")
    return size


def _read_index(path: Path) -> dict[str, Any]:
    try:
        weight_map = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(path, "it can not be read") from None
    names_are_plain = isinstance(weight_map, dict) and all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    )
    if not names_are_plain:
        raise _damaged(path, "weight_map must map tensors to file names")
    return dict(weight_map)


def _damaged(path: Path, how: str) -> ModelError:
    return ModelError(f"{path} is damaged, {how}: download the model again")
