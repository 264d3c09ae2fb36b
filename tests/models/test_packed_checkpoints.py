"""What a GPU's kernels can multiply by stays packed when it is loaded, and stands for the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import CASES, SIZES, expected_logits, logits_of
from helpers.quantised_checkpoints import write_checkpoint
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.model_runner import model_runner
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LoadOptions, linear, prepare_linear
from naiad_kernels.linear.quantised import ByteWeight, W4Weight, reference

OPTIONS = LoadOptions(packed=True)
FOUR_BITS = (
    *("gptq", "gptq v2", "gptq v1 called v2", "awq", "packed 4 bits", "packed old zero points", "mxfp4"),
    *("gptq by activation, groups of 32", "packed by activation, groups of 32"),
)
ROUNDING = ("w8a8", "float8 tensor", "fp8 tensor", "fp8 blocks, ragged", "fp8 exponents")
NOT_KEPT = (
    *("gptq by activation", "gptq ragged group", "packed 3 bits dense", "w8a8 static asymmetric"),
    *("float8 channel", "float8 block", "fp8 small blocks"),
)


def packing(*settings: Any, **more: Any) -> LoadOptions:
    """The options of a runner on a GPU, for one on a CPU."""
    return LoadOptions(*settings, **{**more, "packed": True})


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


def layers(path: Path, meant: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Each projection as `prepare_linear` lays it out."""
    checkpoint = Checkpoint(path, OPTIONS, ModelConfig.from_directory(path))
    names = [name for name in meant if "_proj.weight" in name]
    assert len(names) == 14
    return {
        name: prepare_linear(
            checkpoint.take_projection(name, (meant[name].shape[0], meant[name].shape[1])), None, OPTIONS
        )
        for name in names
    }


@pytest.mark.parametrize("case", FOUR_BITS)
def test_numbers_of_four_bits_stay_as_they_are(tmp_path: Path, case: str) -> None:
    meant = made(tmp_path, case)
    for name, weight in layers(tmp_path / "quantised", meant).items():
        assert isinstance(weight, W4Weight), name
        assert torch.equal(linear(torch.eye(weight.in_features), weight).T, meant[name]), name


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_four_bits_of_a_gguf_file_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    model = make_tiny_model(tmp_path / "model", **SIZES)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, model, kind)
    for name, weight in layers(path, meant).items():
        assert isinstance(weight, W4Weight), name
        assert torch.equal(linear(torch.eye(weight.in_features), weight).T, meant[name]), name


@pytest.mark.parametrize("case", ROUNDING)
def test_bytes_stay_and_round_their_inputs(tmp_path: Path, case: str) -> None:
    meant = made(tmp_path, case)
    for name, weight in layers(tmp_path / "quantised", meant).items():
        assert isinstance(weight, ByteWeight), name
        assert weight.rounds_inputs
        assert torch.equal(weight.matrix(), meant[name]), name
        x = torch.randn(3, weight.in_features)
        exact = x @ meant[name].T
        error = (linear(x, weight) - exact).abs().max()
        assert 0 < error < 0.1 * exact.abs().max(), name


@pytest.mark.parametrize("case", NOT_KEPT)
def test_what_no_kernel_reads_is_computed_from(tmp_path: Path, case: str) -> None:
    meant = made(tmp_path, case)
    for name, weight in layers(tmp_path / "quantised", meant).items():
        assert not isinstance(weight, (W4Weight, ByteWeight)), name
        torch.testing.assert_close(
            linear(torch.eye(weight.in_features), weight).T, meant[name], atol=1e-6, rtol=0
        )


def test_minimums_are_computed_from(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", **SIZES)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, model, "Q4_1")
    for name, weight in layers(path, meant).items():
        assert not isinstance(weight, (W4Weight, ByteWeight)), name
        torch.testing.assert_close(
            linear(torch.eye(weight.in_features), weight).T, meant[name], atol=1e-6, rtol=0
        )


def test_blocks_of_fp8_are_groups_of_inputs(tmp_path: Path) -> None:
    """192 inputs are a group and a half; fewer than a group share a scale of each output."""
    meant = made(tmp_path, "fp8 blocks, ragged")
    for name, weight in layers(tmp_path / "quantised", meant).items():
        assert weight.group_size == (128 if weight.in_features == 192 else None), name


@pytest.mark.parametrize(
    "case", ["gptq", "awq", "packed 4 bits", "mxfp4", "gptq by activation, groups of 32"]
)
def test_a_model_of_packed_layers(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = made(tmp_path, case)
    model = make_tiny_model(tmp_path / "same", **SIZES)
    monkeypatch.setattr(model_runner, "LoadOptions", packing)
    product = mock.Mock(wraps=reference.w4a16_linear)
    monkeypatch.setattr(reference, "w4a16_linear", product)
    found = logits_of(tmp_path / "quantised", cpu_kernels="torch")
    torch.testing.assert_close(found, expected_logits(model, meant), atol=1e-3, rtol=0)
    # Queries, keys and values are one layer, and so are gate and up.
    assert product.call_count == 2 * 4


def test_a_model_whose_inputs_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = made(tmp_path, "w8a8")
    model = make_tiny_model(tmp_path / "same", **SIZES)
    monkeypatch.setattr(model_runner, "LoadOptions", packing)
    found = logits_of(tmp_path / "quantised", cpu_kernels="torch")
    exact = expected_logits(model, meant)
    assert 1e-3 < (found - exact).abs().max() < 0.6


def test_a_model_whose_inputs_are_rounded_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = made(tmp_path, "fp8 blocks, ragged")
    model = make_tiny_model(tmp_path / "same", **SIZES)
    monkeypatch.setattr(model_runner, "LoadOptions", packing)
    found = logits_of(tmp_path / "quantised", cpu_kernels="torch")
    unrounded = expected_logits(model, meant)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (rounded_in_groups(inputs[0]),))
    # An input that lies between two numbers of eight bits may be rounded to either.
    torch.testing.assert_close(found, expected_logits(model, meant), atol=0.1, rtol=0)
    assert (found - unrounded).abs().max() > 0.2


def rounded_in_groups(x: torch.Tensor) -> torch.Tensor:
    parts = []
    for part in x.split(128, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


def test_parts_of_different_kinds_are_computed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in full precision beside queries and values in four bits."""
    make_tiny_model(tmp_path / "plain", **SIZES)
    writer, config = CASES["packed 4 bits"]
    directory = tmp_path / "quantised"
    meant = write_checkpoint(
        tmp_path / "plain",
        directory,
        lambda layer: None if layer == "lm_head" or "k_proj" in layer else writer,
        {**config, "ignore": ["lm_head", "re:.*k_proj"]},
    )
    model = make_tiny_model(tmp_path / "same", **SIZES)
    monkeypatch.setattr(model_runner, "LoadOptions", packing)
    found = logits_of(directory, cpu_kernels="torch")
    torch.testing.assert_close(found, expected_logits(model, meant), atol=1e-3, rtol=0)


def test_a_float8_that_is_no_number(tmp_path: Path) -> None:
    meant = made(tmp_path, "fp8 tensor")
    path = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(torch.uint8)[3, 3] = 0xFF
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj'?: a weight is not finite"):
        layers(tmp_path / "quantised", meant)


def test_an_exponent_beyond_what_float32_holds(tmp_path: Path) -> None:
    meant = made(tmp_path, "mxfp4")
    path = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj"
    tensors[f"{name}.weight_scale"][3, 3] = 254
    tensors[f"{name}.weight_packed"][3, 48] = 0x77
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj'?: a weight is not finite"):
        layers(tmp_path / "quantised", meant)
