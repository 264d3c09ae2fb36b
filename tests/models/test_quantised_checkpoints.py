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
from naiad.config.quantised.layers import AWQLayer, GPTQLayer
from naiad.models.quantised.awq import open_awq
from naiad.models.quantised.gptq import open_gptq
from naiad.models.quantised.stored import LayerTensors
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


class OneLayer:
    """The tensors of a layer "a", words given without signs."""

    def __init__(self, words: dict[str, list[list[int]]], num_outputs: int) -> None:
        self._tensors = {
            name: torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32)
            for name, rows in words.items()
        }
        self._tensors["scales"] = torch.ones(1, num_outputs)

    def has(self, name: str) -> bool:
        return name.removeprefix("a.") in self._tensors

    def take(self, name: str) -> tuple[str, torch.Tensor]:
        return "model.safetensors", self._tensors.pop(name.removeprefix("a."))


@pytest.mark.parametrize(("adds_one", "zeros"), [(True, [2, *[1] * 6, 16]), (False, [1, *[0] * 6, 15])])
def test_known_words_of_gptq(adds_one: bool, zeros: list[int]) -> None:
    """Written by hand: a word is eight inputs of an output; a stored zero point of 15 may mean 16."""
    numbers = torch.zeros(8, 16)
    numbers[0, :8], numbers[7, 8], numbers[7, 15] = torch.arange(8.0), 9, 15
    files = OneLayer(
        {"qweight": [[0x76543210, *[0] * 7], [*[0] * 7, 0xF0000009]], "qzeros": [[0xF0000001]]}, 8
    )
    layer = GPTQLayer(bits=4, group_size=-1, is_symmetric=False, adds_one=adds_one, needs_group_ids=False)
    found = open_gptq(layer, LayerTensors(files, "a", (8, 16)))
    expected = numbers - torch.tensor(zeros)[:, None]
    assert torch.equal(found.rows(0, 8), expected)
    nibbles = found.nibbles()
    assert nibbles is not None
    assert torch.equal(nibbles.matrix(), expected)


def test_known_words_of_awq() -> None:
    """Written by hand: a word is eight outputs of one input in the order 0 2 4 6 1 3 5 7."""
    numbers = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [9, 0, 0, 0, 0, 0, 0, 15]]).T
    zeros = torch.tensor([0, 0, 1, 0, 0, 0, 0, 15])[:, None]
    files = OneLayer({"qweight": [[0x75316420], [0xF0000009]], "qzeros": [[0xF0000010]]}, 8)
    found = open_awq(AWQLayer(group_size=-1), LayerTensors(files, "a", (8, 2)))
    expected = (numbers - zeros).float()
    assert torch.equal(found.rows(0, 8), expected)
    nibbles = found.nibbles()
    assert nibbles is not None
    assert torch.equal(nibbles.matrix(), expected)
