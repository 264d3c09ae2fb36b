"""`naiad quantize`: what round-to-nearest writes, the report, refusals, and how llm-compressor is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.quantised_cases import SIZES, expected_logits, logits_of
from helpers.quantised_checkpoints import group_ids_of, rounded
from helpers.tiny_models import make_tiny_model
from helpers.tiny_tokenizers import byte_level_tokenizer
from naiad.cli.main import main
from naiad.cli.quantize import environment, quality
from naiad.config import EngineConfig, ModelConfig
from naiad.model_runner import ModelRunner
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LoadOptions
from naiad_kernels.native.nibbles import NibbleWeight

VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny float32 checkpoint in two files with its tokenizer, and its model in transformers."""
    directory = tmp_path_factory.mktemp("models") / "plain"
    model = make_tiny_model(directory, max_shard_size="200KB", **{**SIZES, "vocab_size": VOCAB_SIZE})
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    assert (directory / "model.safetensors.index.json").is_file()
    return directory, model


def quantise(source: Path, out: Path, *options: str) -> int:
    return main(["quantize", str(source), str(out), "--text-tokens", "0", *options])


def dequantised(directory: Path, symmetric: bool) -> dict[str, torch.Tensor]:
    """The weights of four bits in a directory, unpacked number by number."""
    stored: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        stored |= load_file(path)
    found = {}
    for name, words in stored.items():
        layer, _, part = name.rpartition(".")
        if part != "weight_packed":
            continue
        outputs, inputs = stored[f"{layer}.weight_shape"].tolist()
        scales = stored[f"{layer}.weight_scale"].float()
        numbers = unpacked(words, inputs)
        zeros = torch.full_like(scales, 8)
        if not symmetric:
            zeros = unpacked(stored[f"{layer}.weight_zero_point"].T, outputs).T
        groups = torch.arange(inputs) // (inputs // scales.shape[1])
        found[f"{layer}.weight"] = (numbers - zeros[:, groups]) * scales[:, groups]
    return found


def unpacked(words: torch.Tensor, count: int) -> torch.Tensor:
    octets = words.contiguous().numpy().view(np.uint8)
    pairs = np.stack((octets & 15, octets >> 4), axis=-1).reshape(len(octets), -1)
    return torch.from_numpy(pairs[:, :count].astype(np.float32))


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_four_bits_are_the_nearest_steps(
    tmp_path: Path, plain: tuple[Path, Any], group_size: int, symmetric: bool
) -> None:
    source, model = plain
    out = tmp_path / "out"
    options = ["--group-size", str(group_size), *(["--symmetric"] if symmetric else [])]
    assert quantise(source, out, *options) == 0
    found = dequantised(out, symmetric)
    weights = {name: each for name, each in model.state_dict().items() if name in found}
    assert len(found) == 14
    for name, weight in weights.items():
        best = rounded(weight.double().numpy(), 4, group_ids_of(weight.shape[1], group_size), symmetric)
        error, least = (found[name] - weight).abs(), np.abs(best.weight - weight.double().numpy())
        # The stored scales have eight bits of mantissa, the best ones eleven.
        assert float(error.mean()) <= 1.02 * float(least.mean())
        # At the ends of a range half a step more is lost, because zero is one of the steps.
        step = torch.from_numpy(best.scales.astype(np.float32)).repeat_interleave(group_size, 1)
        assert bool((error <= 1.02 * step).all()), name


@pytest.mark.parametrize(
    "options", [(), ("--symmetric",), ("--bits", "8")], ids=["asymmetric", "symmetric", "8"]
)
def test_the_engine_computes_with_what_is_written(
    tmp_path: Path, plain: tuple[Path, Any], options: tuple[str, ...]
) -> None:
    source, model = plain
    out = tmp_path / "out"
    assert quantise(source, out, *options) == 0
    if options == ("--bits", "8"):
        stored = {name: each for path in out.glob("*.safetensors") for name, each in load_file(path).items()}
        weights = {
            name: each.float() * stored[f"{name}_scale"].float()
            for name, each in stored.items()
            if each.dtype == torch.int8
        }
    else:
        weights = dequantised(out, "--symmetric" in options)
    assert len(weights) == 14
    before = {name: each.clone() for name, each in model.state_dict().items()}
    expected = expected_logits(model, weights)
    model.load_state_dict(before)
    torch.testing.assert_close(logits_of(out), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("options", [(), ("--symmetric", "--group-size", "64")], ids=str)
def test_the_native_kernels_keep_the_numbers(
    tmp_path: Path, plain: tuple[Path, Any], options: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    assert quantise(plain[0], out, *options) == 0
    config = ModelConfig.from_directory(out)
    checkpoint = Checkpoint(out, LoadOptions(native=True, quantization="int4"), config)
    for name, weight in dequantised(out, bool(options)).items():
        kept = checkpoint.take_projection(name, (weight.shape[0], weight.shape[1]))
        assert isinstance(kept, NibbleWeight)
        assert torch.equal(kept.matrix(), weight), name


def test_everything_but_linear_layers_is_copied(tmp_path: Path, plain: tuple[Path, Any]) -> None:
    source, model = plain
    out = tmp_path / "out"
    assert quantise(source, out) == 0
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {name: each for path in out.glob("*.safetensors") for name, each in load_file(path).items()}
    assert index.keys() == stored.keys()
    for name, weight in model.state_dict().items():
        if "proj" not in name:
            assert torch.equal(stored[name], weight), name
    assert ModelConfig.from_directory(out).quantised is not None


def test_the_report(tmp_path: Path, plain: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = plain
    words = ["quantize", str(source), str(tmp_path / "out"), "--text-tokens", "100", "--bits", "8"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_tokens"] == 99
    assert 0 < report["kl"] < 0.05
    assert 0.8 < report["same_token"] <= 1
    assert report["perplexity_after"] == pytest.approx(report["perplexity_before"], rel=0.05)
    assert 0.3 < report["bytes_after"] / report["bytes_before"] < 0.8
    assert main([*words[:2], str(tmp_path / "again"), *words[3:]]) == 0
    printed = capsys.readouterr().out
    assert "over 99 tokens" in printed
    assert f"KL {report['kl']:.5f}" in printed


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("num_tokens", [2, 127, 128])
def test_a_report_has_as_large_a_cache_as_its_text_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, num_tokens: int
) -> None:
    """It has blocks for the tokens and the one that follows, whatever a model's layers and heads take."""
    model = make_tiny_model(tmp_path, architecture)
    made: list[ModelRunner] = []

    def make(config: EngineConfig) -> ModelRunner:
        made.append(ModelRunner(config))
        return made[-1]

    monkeypatch.setattr(quality, "ModelRunner", make)
    text = [place * place % 97 for place in range(num_tokens)]
    (logits,) = quality._logits_of(tmp_path, [text])
    assert {group.num_blocks for group in made[0].kv_groups} == {num_tokens // 64 + 1}
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_a_group_of_zeros_and_a_tiny_one(tmp_path: Path, plain: tuple[Path, Any]) -> None:
    source = tmp_path / "source"
    model = make_tiny_model(source, **SIZES)
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight[:, :32] = 0
        weight[:, 32:] *= 1e-12
    model.save_pretrained(source)
    (source / "tokenizer.json").write_bytes((plain[0] / "tokenizer.json").read_bytes())
    assert quantise(source, tmp_path / "out") == 0
    found = dequantised(tmp_path / "out", False)["model.layers.0.mlp.up_proj.weight"]
    assert not found[:, :32].any()
    torch.testing.assert_close(found[:, 32:], weight.detach()[:, 32:], atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "gptq"), "--calibration = None: expected a text file, which --method gptq needs"),
        (("--calibration", "text"), "--calibration = 'text': expected only with --method gptq or awq"),
        (("--bits", "8", "--group-size", "32"), "--group-size = 32: expected only with --bits 4"),
        (("--method", "awq", "--bits", "8", "--calibration", "text"), "--bits = 8: expected 4"),
        (("--group-size", "128"), "inputs are no whole groups of 128: choose another --group-size"),
        (("--text", "/none", "--text-tokens", "9"), "--text /none cannot be read"),
        (("--text-tokens", "1"), "--text-tokens = 1: expected 0 for no report, or at least 2 tokens"),
    ],
)
def test_wrong_options(
    tmp_path: Path,
    plain: tuple[Path, Any],
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    assert quantise(plain[0], tmp_path / "out", *options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_checkpoint_that_is_not_there_is_called_as_the_usage_calls_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantise(tmp_path / "none", tmp_path / "out") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"DIR {tmp_path / 'none'}: no such directory" in error
    assert "--model" not in error


def test_what_is_there_is_not_replaced(
    tmp_path: Path, plain: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert quantise(plain[0], tmp_path / "out") == 1
    assert "expected a directory that does not exist or is empty" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_quantised_checkpoints_are_refused(
    tmp_path: Path, plain: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantise(plain[0], tmp_path / "out") == 0
    assert quantise(tmp_path / "out", tmp_path / "again") == 1
    assert "this one is quantised already (compressed-tensors)" in capsys.readouterr().err
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert quantise(tmp_path / "model.gguf", tmp_path / "again") == 1
    assert "not a GGUF file" in capsys.readouterr().err


def test_a_weight_that_is_no_number(
    tmp_path: Path, plain: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    model = make_tiny_model(source, **SIZES)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.nan
    model.save_pretrained(source)
    (source / "tokenizer.json").write_bytes((plain[0] / "tokenizer.json").read_bytes())
    assert quantise(source, tmp_path / "out") == 1
    said = "tensor 'model.layers.1.mlp.down_proj.weight' has a weight that is not a finite number"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_environment_that_cannot_be_installed(
    tmp_path: Path, plain: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("some words " * 20)
    options = ["--method", "gptq", "--calibration", str(text), "--environment", str(tmp_path / "env")]
    assert quantise(plain[0], tmp_path / "out", *options, "--pip-args=--no-such-option") == 1
    error = capsys.readouterr().err
    assert "this method needs llm-compressor (--method rtn needs nothing" in error
    assert "no such option: --no-such-option" in error
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_no_environment(
    tmp_path: Path, plain: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("some words " * 20)
    options = ["--method", "awq", "--calibration", str(text), "--environment", str(tmp_path)]
    assert quantise(plain[0], tmp_path / "out", *options) == 1
    assert "expected a new or empty folder, or a Python environment" in capsys.readouterr().err


def test_the_other_program_gets_layers_and_tokens(
    tmp_path: Path, plain: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the environment keeps the job and copies the checkpoint that round-to-nearest makes."""
    assert quantise(plain[0], tmp_path / "rounded") == 0
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, shutil, sys\n"
        "job = json.loads(pathlib.Path(sys.argv[2]).read_text())\n"
        f"pathlib.Path({str(tmp_path / 'job')!r}).write_text(json.dumps(job))\n"
        f"for path in pathlib.Path({str(tmp_path / 'rounded')!r}).glob('*model*'):\n"
        "    shutil.copy(path, job['target'])\n"
        f"shutil.copy({str(tmp_path / 'rounded' / 'config.json')!r}, job['target'])\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr("naiad.cli.quantize.command.installed", lambda folder, pip_args: python)
    text = tmp_path / "text"
    text.write_text("The quick brown fox. " * 60)
    options = ["--method", "gptq", "--calibration", str(text), "--symmetric", "--group-size", "64"]
    assert quantise(plain[0], tmp_path / "out", *options) == 0
    job = json.loads((tmp_path / "job").read_text())
    assert job["method"] == "gptq"
    assert job["ignore"] == ["lm_head"]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    assert job["group"] == {"targets": ["Linear"], "weights": weights}
    assert {len(each) for each in job["texts"][:-1]} <= {256}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "naiad-job.json").exists()


def test_a_failing_program(
    tmp_path: Path,
    plain: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("naiad.cli.quantize.command.installed", lambda folder, pip_args: Path("/bin/false"))
    text = tmp_path / "text"
    text.write_text("some words " * 20)
    assert quantise(plain[0], tmp_path / "out", "--method", "awq", "--calibration", str(text)) == 1
    assert "(exit code 1, see above): --method rtn needs no calibration" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_lock_is_of_the_torch_that_naiad_has() -> None:
    root = Path(__file__).parents[2]
    ours = (root / "requirements" / "torch.txt").read_text()
    folder = Path(environment.__file__).with_name("llm_compressor")
    assert (folder / "torch.txt").read_text() == ours
    assert ours.strip() in (folder / "pyproject.toml").read_text()
    done = subprocess.run(["grep", "-c", "^llmcompressor==", str(folder / "lock.txt")], check=False)
    assert done.returncode == 0
