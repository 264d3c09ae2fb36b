"""Each format of the default model computes what a float32 checkpoint of its dequantised weights does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers import quantised_checkpoints as write
from helpers.quantised_cases import AWQ, BLOCKS, GPTQ, dynamic, group_of, logits_of, tensors
from helpers.quantised_checkpoints import Writer, write_checkpoint
from naiad.config import ModelConfig
from naiad.models.weights import Checkpoint
from naiad.tokenization.tokenizer import Tokenizer
from naiad_kernels.linear import LoadOptions

pytestmark = pytest.mark.slow

# 576 inputs are no multiple of 128: GPTQ and FP8 have a smaller last group, the others one that divides.
CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (
        write.gptq(4, 128, sym=False, order="shuffled"),
        {**GPTQ, "group_size": 128, "sym": False, "desc_act": True},
    ),
    "awq": (write.awq(96), {**AWQ, "group_size": 96}),
    "packed": (write.packed(3, 96, False), tensors("pack-quantized", group_of(3, 96, False))),
    "w8a8": (
        write.int8(),
        tensors("int-quantized", group_of(8, -1), input_activations=dynamic(8, "int")),
    ),
    "fp8 blocks": (write.float8((128, 128), "weight_scale_inv"), BLOCKS),
    "mxfp4": (
        write.mxfp4(),
        tensors(
            "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        ),
    ),
}


@pytest.fixture(scope="module")
def float32_dir(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model in float32, so that no writer's numbers fall on those that it was made from."""
    target = tmp_path_factory.mktemp("default") / "model"
    target.mkdir()
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((default_model_dir / name).read_bytes())
    stored = load_file(default_model_dir / "model.safetensors")
    save_file({name: each.float() for name, each in stored.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("case", CASES)
def test_a_format_computes_what_its_weights_say(float32_dir: Path, tmp_path: Path, case: str) -> None:
    writer, config = CASES[case]
    meant = write_checkpoint(float32_dir, tmp_path / "model", lambda _: writer, config)
    found = logits_of(tmp_path / "model")
    assert torch.equal(found, logits_of(copy_with(float32_dir, tmp_path / "plain", meant)))
    assert not torch.equal(found, logits_of(float32_dir))


def copy_with(directory: Path, target: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Copy a float32 checkpoint, with these weights in the place of its own."""
    shutil.copytree(directory, target)
    stored = load_file(directory / "model.safetensors")
    assert weights.keys() <= stored.keys()
    whole = {name: each.float().contiguous() for name, each in (stored | weights).items()}
    save_file(whole, target / "model.safetensors")
    return target


def test_the_gguf_file_is_the_converted_model(default_gguf: Path, default_model_dir: Path) -> None:
    """Its weights rounded to bfloat16 are the converted ones; so are configuration and tokens."""
    config, converted = (ModelConfig.from_directory(each) for each in (default_gguf, default_model_dir))
    for field in ("attention", "vocab_size", "hidden_size", "num_kv_heads", "tie_word_embeddings"):
        assert getattr(config, field) == getattr(converted, field), field
    assert config.rms_norm_eps == pytest.approx(converted.rms_norm_eps)
    assert set(config.eos_token_ids) <= set(converted.eos_token_ids)
    stored = load_file(default_model_dir / "model.safetensors")
    checkpoint = Checkpoint(default_gguf, LoadOptions(), config)
    for name, weight in stored.items():
        found = checkpoint.take_matrix(name, tuple(weight.shape))
        assert torch.equal(found.bfloat16(), weight.bfloat16()), name
    checkpoint.finish()
    own, other = Tokenizer.from_directory(default_gguf), Tokenizer.from_directory(default_model_dir)
    assert own.chat_template == other.chat_template
    text = "The year 2026 — it's naïve, isn't it?\n\n  def f(x):\n\treturn x ** 12345  # 你好 🙂"
    assert own.encode(text, True) == other.encode(text, True)
    for token_id in range(0, len(own.table), 37):
        assert own.table.visible_bytes(token_id, True) == other.table.visible_bytes(token_id, True)


def test_logits_of_the_gguf_file(default_gguf: Path, float32_dir: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        default_gguf.parent,
        gguf_file=default_gguf.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    weights = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"}
    assert torch.equal(
        logits_of(default_gguf), logits_of(copy_with(float32_dir, tmp_path / "plain", weights))
    )
