"""Under int4, numbers of four bits that a checkpoint has are computed with as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import CASES, SIZES, expected_logits, logits_of
from helpers.quantised_checkpoints import write_checkpoint
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.models.layers import load_embedding_and_head
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.library import Product
from naiad_kernels.native.nibbles import NibbleWeight
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.variants import best_variant

KEPT = ("gptq", "gptq v2", "gptq v1 called v2", "awq", "packed 4 bits", "packed old zero points")
NOT_KEPT = ("gptq by activation", "gptq ragged group", "awq old keys", "packed 3 bits dense", "mxfp4", "w8a8")
OPTIONS = LoadOptions(native=True, quantization="int4")
# More than what rounded inputs cost these models, whose logits reach 7.
MAX_DEVIATION = 0.6


def made(directory: Path, case: str) -> dict[str, torch.Tensor]:
    """Write the checkpoint of a case, and return the weights that it stands for."""
    make_tiny_model(directory / "plain", **SIZES)
    writer, config = CASES[case]
    return write_checkpoint(
        directory / "plain",
        directory / "quantised",
        lambda layer: None if layer == "lm_head" else writer,
        config,
    )


@pytest.mark.parametrize("case", [*KEPT, *NOT_KEPT])
def test_a_kept_weight_is_exactly_the_stored_one(tmp_path: Path, case: str) -> None:
    meant, directory = made(tmp_path, case), tmp_path / "quantised"
    checkpoint = Checkpoint(directory, OPTIONS, ModelConfig.from_directory(directory))
    for name, weight in meant.items():
        if "_proj." not in name:
            continue
        found = checkpoint.take_projection(name, (weight.shape[0], weight.shape[1]))
        assert isinstance(found, NibbleWeight) == (case in KEPT), name
        assert torch.equal(found.matrix() if isinstance(found, NibbleWeight) else found, weight), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_of_a_gguf_file_are_kept(tmp_path: Path, kind: str) -> None:
    model = make_tiny_model(tmp_path / "model", **SIZES)
    meant = write_gguf(tmp_path / "model.gguf", model, kind)
    path = tmp_path / "model.gguf"
    checkpoint = Checkpoint(path, OPTIONS, ModelConfig.from_directory(path))
    names = [name for name in meant if "_proj.weight" in name]
    assert len(names) == 14
    for name in names:
        found = checkpoint.take_projection(name, (meant[name].shape[0], meant[name].shape[1]))
        assert isinstance(found, NibbleWeight)
        assert torch.equal(found.matrix(), meant[name]), name


@pytest.mark.parametrize(
    ("kind", "product"),
    [
        ("Q4_0", Product.INT4_BY_INT8),
        ("Q4_1", Product.INT4_AND_MINIMUM_BY_INT8),
        ("Q8_0", Product.INT8_BY_INT8),
    ],
)
@pytest.mark.parametrize("is_tied", [False, True], ids=["own", "tied"])
def test_a_head_keeps_its_own_four_bits_or_eight(
    tmp_path: Path, is_tied: bool, kind: str, product: Product
) -> None:
    model = make_tiny_model(tmp_path / "model", **SIZES, tie_word_embeddings=is_tied)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, kind)
    config = ModelConfig.from_directory(path)
    _, head = load_embedding_and_head(config, Checkpoint(path, OPTIONS, config))
    assert isinstance(head, NativeWeight)
    assert head.product == product


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_logits_of_a_tied_head_in_four_bits(tmp_path: Path, kind: str) -> None:
    """Weights that are rounded again deviate by more than a third."""
    model = make_tiny_model(tmp_path / "model", **SIZES, tie_word_embeddings=True)
    exact = expected_logits(model, write_gguf(tmp_path / "model.gguf", model, kind))
    found = logits_of(tmp_path / "model.gguf", quantization="int4", cpu_kernels="native")
    assert (found - exact).square().mean() < 0.1**2 * exact.square().mean()


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("case", KEPT)
def test_logits_differ_by_rounded_inputs_only(tmp_path: Path, case: str) -> None:
    meant = made(tmp_path, case)
    model = make_tiny_model(tmp_path / "same", **SIZES)
    settings = {"quantization": "int4", "cpu_kernels": "native"}
    exact = expected_logits(model, meant)
    found = logits_of(tmp_path / "quantised", **settings)
    assert (found - exact).abs().max() < MAX_DEVIATION
    rounded_again = logits_of(tmp_path / "plain", **settings)
    assert (rounded_again - exact).abs().max() > MAX_DEVIATION


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_logits_of_gguf_files(tmp_path: Path, kind: str) -> None:
    """What has eight bits is rounded to four."""
    model = make_tiny_model(tmp_path / "model", **SIZES)
    exact = expected_logits(model, write_gguf(tmp_path / "model.gguf", model, kind))
    found = logits_of(tmp_path / "model.gguf", quantization="int4", cpu_kernels="native")
    deviation = (found - exact).abs().max()
    assert (deviation < MAX_DEVIATION) == (kind != "Q8_0"), deviation
