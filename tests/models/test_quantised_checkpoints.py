"""Each quantised format computes what a float32 model over the independently dequantised weights computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.quantised_cases import CASES, SIZES, expected_logits, logits_of
from helpers.quantised_checkpoints import Writer, write_checkpoint
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LoadOptions


def body_only(writer: Writer) -> Any:
    return lambda layer: None if layer == "lm_head" else writer


@pytest.mark.parametrize("case", CASES)
def test_a_format_computes_what_its_weights_say(tmp_path: Path, case: str) -> None:
    model = make_tiny_model(tmp_path / "plain", **SIZES)
    writer, config = CASES[case]
    meant = write_checkpoint(tmp_path / "plain", tmp_path / "quantised", body_only(writer), config)
    before = logits_of(tmp_path / "plain")
    expected = expected_logits(model, meant)
    found = logits_of(tmp_path / "quantised")
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    # The writer has changed the weights, so that reading them unquantised would be seen.
    assert (before - expected).abs().max() > 5e-3


@pytest.mark.parametrize("case", CASES)
def test_float32_weights_are_those_that_the_file_stands_for(tmp_path: Path, case: str) -> None:
    make_tiny_model(tmp_path / "plain", **SIZES)
    writer, config = CASES[case]
    directory = tmp_path / "quantised"
    meant = write_checkpoint(tmp_path / "plain", directory, body_only(writer), config)
    checkpoint = Checkpoint(directory, LoadOptions(), ModelConfig.from_directory(directory))
    for name, weight in meant.items():
        found = checkpoint.take_matrix(name, tuple(weight.shape))
        assert torch.equal(found, weight), name
    checkpoint.finish()
