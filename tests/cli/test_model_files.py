from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import SIZES
from helpers.tiny_models import make_tiny_model
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.cli.checkpoints.model_files import check_model_directory, check_safetensors, weight_files
from naiad.errors import ModelError
from naiad.tokenization.tokenizer import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


def write_safetensors(path: Path, num_bytes: int = 64) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(num_bytes))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors")
    return tmp_path


def test_a_whole_model_passes_with_the_size_of_its_weights(model: Path) -> None:
    assert check_model_directory(model) == (model / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"],
)
def test_a_file_that_is_nested_too_deeply_is_named(model: Path, name: str) -> None:
    write_tokenizer(model, byte_level_tokenizer())
    (model / name).write_text("[" * 100_000)
    read = Tokenizer.from_directory if name.startswith("tokenizer") else check_model_directory
    with pytest.raises(ModelError, match=re.escape(name)):
        read(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelError, match=name):
        check_model_directory(model)


def test_a_directory_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        check_model_directory(model)


def test_an_unsupported_architecture_is_named(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["BertModel"]}))
    with pytest.raises(ModelError, match="BertModel"):
        check_model_directory(model)


@pytest.mark.parametrize("num_kept", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_named(model: Path, num_kept: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged, it is truncated"):
        check_model_directory(model)


@pytest.mark.parametrize("header", [b"nope", b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="header can not be read"):
        check_safetensors(path)


def test_a_missing_shard_is_named(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        weight_files(model)


def test_an_index_may_not_name_files_elsewhere(model: Path) -> None:
    index = {"weight_map": {"a": "../model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="weight_map"):
        weight_files(model)


def test_a_gguf_file_is_checked_with_its_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_tiny_model(tmp_path / "model", **SIZES), "Q4_0")
    assert check_model_directory(file) == file.stat().st_size
    tokens = tmp_path / "tokens.gguf"
    changes = {"tokenizer.ggml.pre": "unheard-of"}
    write_gguf(tokens, make_tiny_model(tmp_path / "model", **SIZES), changes=changes)
    with pytest.raises(ModelError, match=r"^tokens\.gguf: tokenizer\.ggml\.pre = 'unheard-of'"):
        check_model_directory(tokens)


def test_a_quantisation_that_is_not_supported_is_refused_before_anything_starts(model: Path) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantization_config\.quant_method = 'bitsandbytes'"):
        check_model_directory(model)
