"""Unsuitable draft models are refused at startup, with the names of both models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.drafting_engines import block_bytes, engine_parts, write_first_layers
from helpers.tiny_models import make_tiny_model
from helpers.tiny_repository import tiny_checkpoint
from helpers.tiny_tokenizers import metaspace_tokenizer, write_tokenizer
from naiad.config import EngineConfig
from naiad.engine import build_engine
from naiad.engine.engine import Engine
from naiad.errors import ConfigError, ModelError, StartupError
from naiad.model_runner import device
from naiad.sequence import EngineRequest, SamplingParams


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "target")


def build(target: Path, drafter: str, **settings: Any) -> Engine:
    return build_engine(
        EngineConfig(
            model_dir=str(target),
            dtype="float32",
            max_num_batched_tokens=256,
            kv_cache_bytes=4_000_000,
            drafter=drafter,
            **settings,
        )
    )


def test_no_such_directory(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere/config\.json does not exist"):
        build(target, "draft_model", draft_model=str(tmp_path / "nowhere"))


def test_damaged_weights(target: Path, tmp_path: Path) -> None:
    draft = write_first_layers(target, tmp_path / "draft", 1)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        build(target, "draft_model", draft_model=str(draft))


def test_another_number_of_ids(target: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "draft")
    with pytest.raises(
        ConfigError, match=f"draft_model = .*draft.*: expected .* of {target}: .* this one 97"
    ):
        build(target, "draft_model", draft_model=str(tmp_path / "draft"))


def test_a_shorter_context(target: Path, tmp_path: Path) -> None:
    draft = write_first_layers(target, tmp_path / "draft", 1)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    with pytest.raises(
        ConfigError, match=r"draft_model = .*draft.* this one is for 64; .* max_model_len = 64"
    ):
        build(target, "draft_model", draft_model=str(draft))
    build(target, "draft_model", draft_model=str(draft), max_model_len=64)


def test_other_tokens(target: Path, tmp_path: Path) -> None:
    draft = write_first_layers(target, tmp_path / "draft", 1)
    write_tokenizer(draft, metaspace_tokenizer())
    with pytest.raises(
        ConfigError, match=f"draft_model = .*draft.*the tokens of {target}: there id 0 is '<s>'"
    ):
        build(target, "draft_model", draft_model=str(draft))


def test_a_draft_model_needs_no_tokenizer_of_its_own(target: Path, tmp_path: Path) -> None:
    draft = write_first_layers(target, tmp_path / "draft", 1)
    (draft / "tokenizer.json").unlink()
    engine = build(target, "draft_model", draft_model=str(draft))
    params = SamplingParams(max_tokens=30)
    engine.add_request(EngineRequest(sequence_id=1, prompt_token_ids=[7, 8, 9], params=params))
    while engine.has_work:
        engine.step()
    assert engine.stats().total_generation_tokens == 30


def test_more_layers_than_there_are(target: Path) -> None:
    with pytest.raises(ConfigError, match=f"num_draft_layers = 4: .* 1 … 3, the layers of {target}"):
        build(target, "self", num_draft_layers=4)


def test_memory_for_both(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is enough memory for one of the models only."""
    size = (target / "model.safetensors").stat().st_size
    monkeypatch.setattr(device, "available_memory_bytes", lambda: int(1.5 * size))
    with pytest.raises(StartupError, match="the weights need"):
        build(target, "draft_model", draft_model=str(target))
    build(target, "self")


def test_blocks_for_both(target: Path, tmp_path: Path) -> None:
    draft = write_first_layers(target, tmp_path / "draft", 1)
    engine, runner = engine_parts(target, num_blocks=9, drafter="draft_model", draft_model=str(draft))
    assert block_bytes(target, draft) == block_bytes(target) * 4 // 3
    assert runner.num_blocks == 9
    assert engine.max_model_len == 9 * 16


@pytest.mark.parametrize(("num_layers", "expected"), [(0, 1), (2, 2), (3, 3)])
def test_so_many_layers_draft(target: Path, num_layers: int, expected: int) -> None:
    _, runner = engine_parts(target, drafter="self", num_draft_layers=num_layers)
    assert runner.draft_runner is not None
    assert runner.draft_runner.model_config.num_layers == expected
    assert runner.model_config.num_layers == 3
