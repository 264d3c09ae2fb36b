"""How much memory the checks before a start take a model to need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.blank_checkpoint import write_checkpoint
from naiad.cli.main import main
from naiad.cli.repository.check import check_repository, with_directories
from naiad.cli.repository.model_entries import read_repository, with_parameters
from naiad.errors import StartupError

NUM_PROJECTION_WEIGHTS = 8 * 1024 * (4 * 1024 + 3 * 4096)
NUM_EMBEDDING_WEIGHTS = 1000 * 1024
ENOUGH = 1 << 50
CACHE = {"kv_cache_bytes": "1000"}


def checkpoint(folder: Path, dtype: str = "bfloat16") -> int:
    """Write a checkpoint whose file is empty but for its header; return the file's size."""
    write_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    width = 4 if dtype == "float32" else 2
    num_bytes = width * (NUM_PROJECTION_WEIGHTS + 2 * NUM_EMBEDDING_WEIGHTS)
    shape = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"w": shape}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + num_bytes)
    return path.stat().st_size


@pytest.fixture
def size(tmp_path: Path) -> int:
    return checkpoint(tmp_path / "model")


def needed(folder: Path, parameters: Mapping[str, str], available_bytes: int = ENOUGH) -> int:
    """The memory that the checkpoint in `folder / "model"` needs with these parameters."""
    made = folder / "repository"
    if not made.exists():
        words = ["--model", str(folder / "model"), "--name", "a", str(made)]
        assert main(["repository", "create", *words]) == 0
    entries = [with_parameters(each, {**CACHE, **parameters}) for each in read_repository(made)]
    entries = with_directories(entries, lambda name, _: Path(name))
    (need,) = check_repository(entries, available_bytes)
    return need.memory_bytes


def test_weights_that_are_rounded_at_load_need_less_than_their_files(tmp_path: Path, size: int) -> None:
    processes = needed(tmp_path, {}) - size
    for quantization, bits in (("int8", 8), ("int4", 4)):
        weights = needed(tmp_path, {"quantization": quantization}) - processes
        # Scales and what is not rounded come to it.
        assert NUM_PROJECTION_WEIGHTS * bits // 8 < weights < size * (bits + 1) // 16


def test_a_machine_that_rounded_weights_fit_is_not_refused(tmp_path: Path, size: int) -> None:
    available = needed(tmp_path, {}) - 1
    with pytest.raises(StartupError, match="GiB of memory are available"):
        needed(tmp_path, {}, available)
    needed(tmp_path, {"quantization": "int4"}, available)


def test_a_draft_model_is_rounded_as_it_is_told(tmp_path: Path, size: int) -> None:
    checkpoint(tmp_path / "draft")
    draft = {"drafter": "draft_model", "draft_model": str(tmp_path / "draft")}
    whole = needed(tmp_path, draft)
    assert whole == needed(tmp_path, {}) + size
    rounded = needed(tmp_path, {"quantization": "int4"})
    alone = rounded - (needed(tmp_path, {}) - size)
    assert needed(tmp_path, draft | {"quantization": "int4"}) == rounded + alone
    assert needed(tmp_path, draft | {"draft_quantization": "int4"}) == whole - size + alone
    assert needed(tmp_path, draft | {"quantization": "int4", "draft_quantization": "none"}) == rounded + size


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("auto", 0.5), ("bfloat16", 0.5)])
def test_weights_of_32_bits_may_be_narrowed(tmp_path: Path, dtype: str, share: float) -> None:
    size = checkpoint(tmp_path / "model", "float32")
    processes = needed(tmp_path, {"dtype": "float32"}) - size
    assert needed(tmp_path, {"dtype": dtype}) == processes + int(size * share)
