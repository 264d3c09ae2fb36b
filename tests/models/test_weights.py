from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.models import load_model, safetensors_files, weights
from naiad.models.safetensors_files import SafetensorsFiles
from naiad_kernels.linear import LoadOptions

TENSOR = "model.layers.1.self_attn.k_proj.weight"


def load(directory: Path) -> None:
    config = ModelConfig.from_directory(directory)
    load_model(str(directory), config, LoadOptions())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path)
    return tmp_path


@pytest.fixture
def sharded_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def rewrite(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace, add, or (None) remove tensors of a single-file checkpoint."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")


def test_a_whole_checkpoint_loads(model_dir: Path) -> None:
    load(model_dir)


def test_a_sharded_checkpoint_loads(sharded_dir: Path) -> None:
    load(sharded_dir)


@pytest.mark.parametrize("kept_bytes", [4, 200, -1])
def test_a_truncated_file_is_named(model_dir: Path, kept_bytes: int) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete"):
        load(model_dir)


def test_a_corrupt_header_is_named(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(bytes(data))
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(model_dir)


def test_no_weights_at_all(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load(model_dir)


def test_pickled_weights_are_not_weights(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    torch.save(tensors, model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match="has no weights"):
        load(model_dir)


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    rewrite(model_dir, {TENSOR: None})
    with pytest.raises(ModelError, match=f"model.safetensors: tensor '{TENSOR}' is missing"):
        load(model_dir)


def test_a_wrong_shape_is_named(model_dir: Path) -> None:
    rewrite(model_dir, {TENSOR: torch.zeros(20, 35)})
    with pytest.raises(ModelError, match=rf"model.safetensors: tensor '{TENSOR}' has shape \(20, 35\)"):
        load(model_dir)


def test_a_wrong_dtype_is_named(model_dir: Path) -> None:
    rewrite(model_dir, {TENSOR: torch.zeros(20, 36, dtype=torch.int8)})
    with pytest.raises(ModelError, match=f"tensor '{TENSOR}' has dtype torch.int8"):
        load(model_dir)


def test_an_unexpected_tensor_is_named(model_dir: Path) -> None:
    rewrite(model_dir, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(60)})
    with pytest.raises(ModelError, match=r"self_attn\.q_proj\.bias"):
        load(model_dir)


def test_stored_rotary_frequencies_are_ignored(model_dir: Path) -> None:
    rewrite(model_dir, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5)})
    load(model_dir)


def tied_dir(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    """A model whose head is the embedding and is stored too; returns the embedding."""
    make_tiny_model(directory, tie_word_embeddings=True)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    rewrite(directory, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()})
    return embedding


TIED = [
    (torch.float32, LoadOptions()),
    (torch.float32, LoadOptions(torch.bfloat16)),
    (torch.bfloat16, LoadOptions(native=True)),
]


@pytest.mark.parametrize(("dtype", "options"), TIED, ids=["whole", "rounded", "narrow"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_stored_head_that_is_tied_must_be_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: LoadOptions, place: int
) -> None:
    monkeypatch.setattr(weights, "_COMPARED_WEIGHTS", 1000)
    head = tied_dir(tmp_path, dtype).clone()
    config = ModelConfig.from_directory(tmp_path)
    load_model(str(tmp_path), config, options)
    head[place, place] += 1
    rewrite(tmp_path, {"lm_head.weight": head})
    with pytest.raises(
        ModelError, match=r"^tensor 'lm_head\.weight' is not the embedding.*: set it to false"
    ):
        load_model(str(tmp_path), config, options)


def test_a_stored_head_that_is_tied_must_have_the_embeddings_shape(tmp_path: Path) -> None:
    embedding = tied_dir(tmp_path, torch.float32)
    rewrite(tmp_path, {"lm_head.weight": embedding[:-1].clone()})
    with pytest.raises(ModelError, match=r"tensor 'lm_head\.weight' has shape \(96, 36\)"):
        load(tmp_path)


def test_a_missing_shard_is_named(sharded_dir: Path) -> None:
    shard = sorted(sharded_dir.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        load(sharded_dir)


def test_a_shard_without_its_tensor_is_named(sharded_dir: Path) -> None:
    index = json.loads((sharded_dir / "model.safetensors.index.json").read_text())
    shard = sharded_dir / index["weight_map"][TENSOR]
    tensors = load_file(shard)
    del tensors[TENSOR]
    save_file(tensors, shard)
    with pytest.raises(ModelError, match=f"{shard.name} has no tensor '{TENSOR}'"):
        load(sharded_dir)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_can_not_lead_elsewhere(sharded_dir: Path, name: str) -> None:
    path = sharded_dir / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][TENSOR] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"is not the name of a \.safetensors file"):
        load(sharded_dir)


@pytest.mark.parametrize("index", ["{}", "[" * 100_000])
def test_an_unreadable_index_is_named(sharded_dir: Path, index: str) -> None:
    (sharded_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="has no readable weight_map"):
        load(sharded_dir)


@pytest.fixture
def half_read(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> SafetensorsFiles:
    """Files of which a tensor was read, and which are opened again for the next one."""
    monkeypatch.setattr(safetensors_files, "_MAX_MAPPED_BYTES", 0)
    files = SafetensorsFiles(model_dir)
    files.take("model.norm.weight")
    return files


def test_a_file_that_is_opened_again_is_read_on(half_read: SafetensorsFiles, model_dir: Path) -> None:
    stored = load_file(model_dir / "model.safetensors")
    assert torch.equal(half_read.take(TENSOR)[1], stored[TENSOR])


def test_a_file_that_was_replaced_while_it_was_read_is_refused(
    half_read: SafetensorsFiles, model_dir: Path, tmp_path: Path
) -> None:
    """Its names and shapes are the same, so nothing else would tell."""
    tensors = {name: tensor + 1 for name, tensor in load_file(model_dir / "model.safetensors").items()}
    save_file(tensors, tmp_path / "new")
    (tmp_path / "new").replace(model_dir / "model.safetensors")
    with pytest.raises(ModelError, match=r"^model\.safetensors was changed while it was read"):
        half_read.take(TENSOR)


@pytest.mark.parametrize("kept_bytes", [None, 4, 200])
def test_a_file_that_is_removed_or_cut_while_it_is_read_is_named(
    half_read: SafetensorsFiles, model_dir: Path, kept_bytes: int | None
) -> None:
    path = model_dir / "model.safetensors"
    data = path.read_bytes()[:kept_bytes]
    path.unlink()
    if kept_bytes is not None:
        path.write_bytes(data)
    with pytest.raises(ModelError, match=rf"^model\.safetensors: tensor '{TENSOR}' can not be read: "):
        half_read.take(TENSOR)
