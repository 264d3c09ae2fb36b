"""Each quantised format with its writer and its configuration, for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers import quantised_checkpoints as write
from helpers.quantised_checkpoints import Writer
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.sequence import SamplingParams

# Sizes that every packing can hold; 192 is no multiple of 128.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_hidden_layers": 2,
}
PROMPT = [(17 * place * place + 5 * place) % 96 for place in range(19)]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}


def tensors(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def dynamic(bits: int, kind: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}


def group_of(bits: int, size: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    return {"num_bits": bits, "symmetric": symmetric, **strategy, **more}


CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (write.gptq(4, 32, sym=True), GPTQ),
    "gptq 2 bits": (write.gptq(2, 32, sym=True), {**GPTQ, "bits": 2}),
    "gptq 3 bits asymmetric": (write.gptq(3, 32, sym=False), {**GPTQ, "bits": 3, "sym": False}),
    "gptq 8 bits": (write.gptq(8, -1, sym=True), {**GPTQ, "bits": 8, "group_size": -1}),
    "gptq v2": (
        write.gptq(4, 64, sym=False, version=2),
        {**GPTQ, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq v2 called v1": (write.gptq(4, 32, sym=True, version=2), GPTQ),
    "gptq v1 called v2": (write.gptq(4, 32, sym=True), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq by activation": (
        write.gptq(4, 16, sym=False, order="shuffled"),
        {**GPTQ, "group_size": 16, "sym": False, "desc_act": True},
    ),
    "gptq by activation, groups of 32": (
        write.gptq(4, 32, sym=False, order="shuffled"),
        {**GPTQ, "sym": False, "desc_act": True},
    ),
    "gptq ragged group": (write.gptq(4, 48, sym=True), {**GPTQ, "group_size": 48}),
    "gptq without g_idx": (write.gptq(4, 32, sym=True, order="missing"), GPTQ),
    "awq": (write.awq(32), AWQ),
    "awq old keys": (
        write.awq(16),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"},
    ),
    "packed 4 bits": (write.packed(4, 32, True), tensors("pack-quantized", group_of(4, 32))),
    "packed asymmetric": (write.packed(4, 16, False), tensors("pack-quantized", group_of(4, 16, False))),
    "packed old zero points": (
        write.packed(4, 32, False, old_zeros=True),
        tensors("pack-quantized", group_of(4, 32, False)),
    ),
    "packed channel": (write.packed(8, -1, False), tensors("pack-quantized", group_of(8, -1, False))),
    "packed 3 bits dense": (write.packed(3, 32, False), tensors("pack-quantized", group_of(3, 32, False))),
    "packed 3 bits with gaps": (
        write.packed(3, 32, False, dense=False),
        tensors("pack-quantized", group_of(3, 32, False)),
    ),
    "packed 6 bits dense": (write.packed(6, 64, True), tensors("pack-quantized", group_of(6, 64))),
    "packed 5 bits with gaps": (
        write.packed(5, 64, True, dense=False),
        tensors("pack-quantized", group_of(5, 64)),
    ),
    "packed by activation": (
        write.packed(4, 16, True, g_idx=True),
        tensors("pack-quantized", group_of(4, 16, actorder="group")),
    ),
    "packed by activation, groups of 32": (
        write.packed(4, 32, True, g_idx=True),
        tensors("pack-quantized", group_of(4, 32, actorder="group")),
    ),
    "w8a8": (
        write.int8(),
        tensors("int-quantized", group_of(8, -1), input_activations=dynamic(8, "int")),
    ),
    "w8a8 static asymmetric": (
        write.int8(symmetric=False, static_inputs=True, flat_scale=True),
        tensors("int-quantized", group_of(8, -1, False), input_activations={"num_bits": 8, "type": "int"}),
    ),
    "float8 tensor": (
        write.float8((0, 0), input_scale="input_scale"),
        tensors(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            input_activations={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
    ),
    "float8 channel": (
        write.float8(None),
        tensors("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
    "float8 group": (
        write.float8((1, 16)),
        tensors("float-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16}),
    ),
    "float8 block": (
        write.float8((128, 128)),
        tensors(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        ),
    ),
    "fp8 tensor": (
        write.float8((0, 0)),
        {**FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "fp8 tensor, names of transformers": (
        write.float8((0, 0), "weight_scale_inv", input_scale="activation_scale"),
        {**FP8, "activation_scheme": "static", "weight_block_size": None, "expert_dtype": "fp8"},
    ),
    "fp8 blocks, static inputs": (
        write.float8((128, 128), "weight_scale_inv", input_scale="activation_scale"),
        {**BLOCKS, "activation_scheme": "static"},
    ),
    "fp8 blocks, ragged": (write.float8((128, 128), "weight_scale_inv"), BLOCKS),
    "fp8 small blocks": (
        write.float8((24, 40), "weight_scale_inv"),
        {**BLOCKS, "weight_block_size": [24, 40]},
    ),
    "fp8 exponents": (
        write.float8((128, 128), "weight_scale_inv", exponents=True),
        {**BLOCKS, "scale_fmt": "ue8m0"},
    ),
    "mxfp4": (
        write.mxfp4(),
        tensors(
            "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        ),
    ),
}


def logits_of(directory: Path, **settings: Any) -> torch.Tensor:
    """The logits `[len(PROMPT), vocab_size]` of a prompt."""
    values = {"dtype": "float32", "block_size": 16, "max_num_batched_tokens": 256, **settings}
    runner = ModelRunner(EngineConfig(model_dir=str(directory), start_cache=False, **values))
    params = SamplingParams(max_tokens=1, returns_context_logits=True)
    row = LoneRow(0, PROMPT, 0, [4, 2], params, samples=True, num_prompt_tokens=len(PROMPT))
    output = runner.run(lone_step([row]))
    assert output.errors == {}
    return torch.frombuffer(bytearray(output.context_logits[0]), dtype=torch.float32).view(len(PROMPT), -1)


def expected_logits(model: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]
