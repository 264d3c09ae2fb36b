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
