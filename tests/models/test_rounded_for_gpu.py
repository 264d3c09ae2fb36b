"""Weights that are rounded at load for the kernels of a GPU, beside the same rounding written out here."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.gguf_files import write_gguf
from helpers.quantised_cases import CASES, SIZES, expected_logits, logits_of
from helpers.quantised_checkpoints import write_checkpoint
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError, StartupError
from naiad.model_runner import ModelRunner, model_runner
from naiad.model_runner import device as device_module
from naiad.models.layers import load_embedding_and_head
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LoadOptions, linear, prepare_linear
from naiad_kernels.linear.quantised import ByteWeight, W4Weight
from naiad_kernels.linear.quantised.kernel.plan import byte_tile, plan_product, w4_tile
from naiad_kernels.native.nibbles import NibbleWeight

KINDS = ("int8", "int4", "fp8")


def options_of(kind: str, dtype: torch.dtype = torch.float32) -> LoadOptions:
    return LoadOptions(dtype, packed=True, quantization=kind)


def nearest(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The weight rounded as the kind says, in float32."""
    if kind == "int4":
        groups = weight.unflatten(1, (-1, 32))
        least, greatest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((greatest - least) / 15).half().float()[:, :, None]
        zeros = (-least[:, :, None] / scales).round()
        return (((groups / scales + zeros).round().clamp(0, 15) - zeros) * scales).flatten(1)
    largest = {"int8": 127, "fp8": 448}[kind]
    scales = weight.abs().amax(1, keepdim=True) / largest
    codes = weight / scales
    # Halfway between two whole numbers the greater one is taken.
    return ((codes + 0.5).floor() if kind == "int8" else codes.to(torch.float8_e4m3fn).float()) * scales


def rounded_model(directory: Path, kind: str, **settings: Any) -> Any:
    """The model of transformers with rounded projections, and the head in eight bits."""
    model = make_tiny_model(directory, **SIZES, **settings)
    weights = {
        name: nearest(weight, "int8" if name == "lm_head.weight" else kind)
        for name, weight in model.state_dict().items()
        if "_proj.weight" in name or name == "lm_head.weight"
    }
    assert len(weights) == 15
    if kind == "fp8":
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, inputs: (nearest(inputs[0][0], "fp8")[None],))
    model.load_state_dict(weights, strict=False)
    return model


def loading(kind: str) -> Any:
    """A runner on a CPU loads as one on a GPU does."""

    def options(*settings: Any, **more: Any) -> LoadOptions:
        return LoadOptions(*settings[:-1], kind, **{**more, "packed": True})

    return mock.patch.object(model_runner, "LoadOptions", options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_with_the_nearest_weights(tmp_path: Path, kind: str) -> None:
    expected = expected_logits(rounded_model(tmp_path, kind), {})
    unrounded = logits_of(tmp_path, cpu_kernels="torch")
    with loading(kind):
        found = logits_of(tmp_path, cpu_kernels="torch")
    # An input that lies between two numbers of eight bits may be rounded to either.
    atol = 0.1 if kind == "fp8" else 1e-3
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    assert (found - unrounded).abs().max() > 5 * atol


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_with_the_nearest_weights(tmp_path: Path, kind: str) -> None:
    expected = expected_logits(rounded_model(tmp_path, kind), {})
    found = logits_of(tmp_path, device="cuda", quantization=kind)
    torch.testing.assert_close(found, expected, atol=0.1 if kind == "fp8" else 2e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_of_any_dtype_and_size(kind: str, dtype: torch.dtype) -> None:
    """608 inputs are no multiple of 128."""
    matrix = torch.randn(40, 608).to(dtype)
    matrix[3] = 0
    bias = torch.randn(40).to(dtype)
    weight = prepare_linear(matrix, bias, options_of(kind, dtype))
    if kind == "int4":
        assert isinstance(weight, W4Weight)
        assert weight.group_size == 32
    else:
        assert isinstance(weight, ByteWeight)
        assert weight.rounds_inputs == (kind == "fp8")
    meant = nearest(matrix.float(), kind).nan_to_num()
    found = linear(torch.eye(608), weight)
    torch.testing.assert_close(found, meant.T + bias.float(), atol=1e-5, rtol=0)


def test_scales_beyond_float16_have_eight_bits() -> None:
    matrix = torch.randn(16, 64) * 1e7
    weight = prepare_linear(matrix, None, options_of("int4"))
    assert isinstance(weight, ByteWeight)
    torch.testing.assert_close(linear(torch.eye(64), weight).T, nearest(matrix, "int8"))


def test_whole_zero_points_lose_little_more_than_eighths() -> None:
    matrix = torch.randn(256, 608)
    errors = []
    for has_whole_zeros in (True, False):
        weight = NibbleWeight.rounded(matrix, has_whole_zeros)
        assert weight is not None
        zeros = weight.zero_points()
        assert zeros is not None
        assert torch.equal(zeros, zeros.round()) == has_whole_zeros
        errors.append((weight.matrix() - matrix).square().mean().sqrt().item())
    assert 1 < errors[0] / errors[1] < 1.1


def test_a_group_of_tiny_weights_keeps_its_zero_among_the_numbers() -> None:
    """Its scale is a subnormal number of float16, half of what it should be."""
    matrix = torch.randn(16, 64)
    matrix[5, 32:] = torch.tensor([-2.2e-6, 0.0]).repeat(16)
    weight = prepare_linear(matrix, None, options_of("int4"))
    assert isinstance(weight, W4Weight)
    torch.testing.assert_close(linear(torch.eye(64), weight)[:, 5][32:], matrix[5, 32:], atol=2e-6, rtol=0)


@pytest.mark.parametrize("is_tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_has_eight_bits_and_the_embedding_all(tmp_path: Path, kind: str, is_tied: bool) -> None:
    model = make_tiny_model(tmp_path, **SIZES, tie_word_embeddings=is_tied)
    config = ModelConfig.from_directory(tmp_path)
    checkpoint = Checkpoint(tmp_path, options_of(kind), config)
    embedding, head = load_embedding_and_head(config, checkpoint)
    assert isinstance(head, ByteWeight)
    assert head.values.dtype == torch.int8
    assert not head.rounds_inputs
    ids = torch.arange(SIZES["vocab_size"])
    assert torch.equal(embedding.rows(ids), model.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["gptq", "w8a8", "mxfp4", "fp8 tensor"])
def test_what_is_packed_is_not_rounded_again(tmp_path: Path, case: str, kind: str) -> None:
    make_tiny_model(tmp_path / "plain", **SIZES)
    writer, config = CASES[case]
    directory = tmp_path / "quantised"
    meant = write_checkpoint(
        tmp_path / "plain", directory, lambda layer: None if layer == "lm_head" else writer, config
    )
    checkpoint = Checkpoint(directory, options_of(kind), ModelConfig.from_directory(directory))
    name = "model.layers.1.mlp.down_proj.weight"
    kept = checkpoint.take_projection(name, (64, 192))
    weight = prepare_linear(kept, None, options_of(kind))
    if isinstance(weight, ByteWeight):
        assert torch.equal(weight.matrix(), meant[name])
    else:
        assert torch.equal(linear(torch.eye(192), weight).T, meant[name])


@pytest.mark.parametrize("kind", KINDS)
def test_minimums_are_rounded(tmp_path: Path, kind: str) -> None:
    model = make_tiny_model(tmp_path / "model", **SIZES)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, model, "Q4_1")
    checkpoint = Checkpoint(path, options_of(kind), ModelConfig.from_directory(path))
    name = "model.layers.1.mlp.down_proj.weight"
    weight = prepare_linear(checkpoint.take_projection(name, (64, 192)), None, options_of(kind))
    found = linear(torch.eye(192), weight).T
    torch.testing.assert_close(found, nearest(meant[name], kind), atol=1e-5, rtol=0)


@pytest.mark.parametrize("key", ["quantization", "draft_quantization"])
def test_an_old_gpu_refuses_fp8(tmp_path: Path, key: str) -> None:
    make_tiny_model(tmp_path, **SIZES)
    drafts = {"drafter": "draft_model", "draft_model": str(tmp_path)}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        pytest.raises(ConfigError, match=rf"^{key} = 'fp8': expected .*none, int8 or int4: this GPU is old"),
    ):
        logits_of(tmp_path, device="cuda", **drafts, **{key: "fp8"})


@pytest.mark.parametrize(("kind", "weight_bytes"), [("int8", 1), ("fp8", 1), ("int4", 5 / 8)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_asked_for_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kind: str, weight_bytes: float
) -> None:
    """Two models: projections as they are rounded, heads in eight bits, embeddings in bfloat16."""
    model = make_tiny_model(tmp_path, **SIZES)
    sizes = {name: weight.numel() for name, weight in model.state_dict().items()}
    of_projections = sum(size for name, size in sizes.items() if "_proj.weight" in name)
    of_head = sizes["lm_head.weight"]
    needed = 2 * int((of_projections * weight_bytes + of_head * (1 + 2)) * 1.1)
    checkpoints = [(str(tmp_path), ModelConfig.from_directory(tmp_path))] * 2

    def check(num_bytes: int) -> None:
        monkeypatch.setattr(device_module, "available_memory_bytes", lambda: num_bytes)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (num_bytes, num_bytes))
        device_module.check_memory(checkpoints, [kind, kind], torch.bfloat16, torch.device(device))

    check(needed)
    with pytest.raises(
        StartupError, match=rf"in torch\.bfloat16 and {kind}, .* a smaller model, dtype or quantization$"
    ):
        check(needed - 1)


@pytest.mark.parametrize("max_num_seqs", [4, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_start_launches_every_variant_of_the_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, max_num_seqs: int
) -> None:
    """Also those of the head, which multiplies only the tokens that are sampled or whose logits are asked."""
    make_tiny_model(tmp_path, **{**SIZES, "vocab_size": 160})
    config = EngineConfig(
        model_dir=str(tmp_path),
        dtype="float32",
        block_size=16,
        max_num_seqs=max_num_seqs,
        cpu_kernels="torch",
    )
    with loading(kind):
        runner = ModelRunner(config)
    launched: dict[tuple[int, int], set[int]] = {}
    for form in (W4Weight, ByteWeight):
        multiply = form.multiply

        def recording(weight: Any, x: torch.Tensor, residual: Any, multiply: Any = multiply) -> Any:
            launched.setdefault((weight.in_features, weight.out_features), set()).add(len(x))
            return multiply(weight, x, residual)

        monkeypatch.setattr(form, "multiply", recording)
    runner._rehearse(dataclasses.replace(config, cpu_kernels="auto", quantization="int8"), [runner._model])
    assert len(launched) == 5
    for sizes, rows in launched.items():
        for tile_of, element_bytes in itertools.product((byte_tile, w4_tile), (1, 2, 4)):
            variant = partial(variant_of, tile_of=tile_of, element_bytes=element_bytes, sizes=sizes)
            assert set(map(variant, range(1, max(rows) + 1))) == set(map(variant, rows)), sizes


def variant_of(num_rows: int, *, tile_of: Any, element_bytes: int, sizes: tuple[int, int]) -> Any:
    """What the kernel of a product is compiled for."""
    tile = tile_of(num_rows, element_bytes, 90)
    return tile, plan_product(tile, num_rows, *sizes).is_split
