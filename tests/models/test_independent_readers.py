"""compressed-tensors reads from our writers' files what they say they wrote.

The package is no dependency of Naiad: it is installed into a folder of its own, which needs a package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.quantised_cases import CASES, SIZES
from helpers.quantised_checkpoints import write_checkpoint
from helpers.tiny_models import make_tiny_model
from helpers.tiny_tokenizers import byte_level_tokenizer
from naiad.cli.main import main
from naiad.config import ModelConfig
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LoadOptions

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "helpers" / "read_with_compressed_tensors.py"
PACKAGES = ("compressed-tensors==0.20.0", "loguru")
READ = (
    "awq",
    "packed 4 bits",
    "packed asymmetric",
    "packed channel",
    "packed 3 bits dense",
    "packed 6 bits dense",
    "w8a8",
    "float8 tensor",
    "float8 channel",
    "float8 group",
    "float8 block",
    "mxfp4",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("packages")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        *PACKAGES,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"compressed-tensors cannot be installed here: {done.stderr.strip()[-200:]}")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("case", READ)
def test_compressed_tensors_reads_the_same(tmp_path: Path, environment: dict[str, str], case: str) -> None:
    make_tiny_model(tmp_path / "plain", **SIZES)
    writer, config = CASES[case]
    directory = tmp_path / "model"
    meant = write_checkpoint(
        tmp_path / "plain", directory, lambda layer: None if layer == "lm_head" else writer, config
    )
    out = tmp_path / "found.safetensors"
    subprocess.run([sys.executable, str(PROGRAM), str(directory), str(out)], env=environment, check=True)
    found = load_file(out)
    assert len(found) == 14
    for layer, weight in found.items():
        torch.testing.assert_close(weight, meant[f"{layer}.weight"], atol=0, rtol=1e-6)


@pytest.mark.parametrize("options", [(), ("--symmetric", "--group-size", "64"), ("--bits", "8")], ids=str)
def test_compressed_tensors_reads_what_quantize_writes(
    tmp_path: Path, environment: dict[str, str], options: tuple[str, ...]
) -> None:
    make_tiny_model(tmp_path / "plain", **SIZES)
    byte_level_tokenizer().save(str(tmp_path / "plain" / "tokenizer.json"))
    directory, out = tmp_path / "model", tmp_path / "found.safetensors"
    words = ["quantize", str(tmp_path / "plain"), str(directory), "--text-tokens", "0", *options]
    assert main(words) == 0
    subprocess.run([sys.executable, str(PROGRAM), str(directory), str(out)], env=environment, check=True)
    found = load_file(out)
    assert len(found) == 14
    checkpoint = Checkpoint(directory, LoadOptions(), ModelConfig.from_directory(directory))
    for layer, weight in found.items():
        ours = checkpoint.take(f"{layer}.weight", tuple(weight.shape))
        torch.testing.assert_close(weight, ours, atol=0, rtol=1e-6)
