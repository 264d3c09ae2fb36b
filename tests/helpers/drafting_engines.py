"""Engines of real tiny checkpoints whose drafter is always asked, and checkpoints for drafting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.engine_drive import CheckedScheduler
from naiad.config import EngineConfig, ModelConfig
from naiad.engine import Engine
from naiad.engine.build import make_drafter, make_kv_cache
from naiad.model_runner import ModelRunner
from naiad.models.decoder import DecoderModel
from naiad.models.native_model import NativeModel
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost

BLOCK = 16


def write_first_layers(source: Path, target: Path, num_layers: int) -> Path:
    """A checkpoint with the first layers of another one, its norm, its head and its tokenizer."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < num_layers}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _layer(name: str) -> int:
    """The layer that a tensor belongs to; −1 for the others."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def block_bytes(*directories: Path) -> int:
    """Bytes of a block of all these float32 models."""
    shapes = [ModelConfig.from_directory(directory) for directory in directories]
    return sum(2 * each.num_layers * each.num_kv_heads * each.head_dim * BLOCK * 4 for each in shapes)


def engine_parts(
    model_dir: Path,
    num_blocks: int = 128,
    budget: int = 256,
    is_cached: bool = True,
    dtype: str = "float32",
    **settings: Any,
) -> tuple[Engine, ModelRunner]:
    """Make an engine whose steps all cost the same, so that all drafts are tried; also return its runner.

    Args:
        model_dir: directory of the target.
        num_blocks: number of blocks in its pool; groups with full attention may have more, if windows
            leave memory over.
        budget: maximum number of tokens of a step.
        is_cached: whether it has a prefix cache.
        dtype: float32 or bfloat16.
        settings: other settings of the `EngineConfig`.
    """
    directories = [model_dir, Path(settings["draft_model"])] if "draft_model" in settings else [model_dir]
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype=dtype,
        max_num_batched_tokens=budget,
        max_num_seqs=min(32, budget),
        block_size=BLOCK,
        kv_cache_bytes=num_blocks * block_bytes(*directories) // (1 if dtype == "float32" else 2),
        enable_prefix_caching=is_cached,
        **settings,
    )
    model_runner = ModelRunner(config)
    assert model_runner.num_blocks == num_blocks or len(model_runner.kv_groups) > 1
    kv_cache = make_kv_cache(config, model_runner.kv_groups, budget)
    drafter = make_drafter(config, model_runner, kv_cache)
    policy = SpeculationPolicy(StepCost([(1, 1.0), (1 << 16, 1.0)]))
    speculator = Speculator(drafter, policy, config.num_speculative_tokens)
    scheduler = CheckedScheduler(
        kv_cache, SchedulerLimits(config.max_num_seqs, budget), speculator=speculator
    )
    return Engine(scheduler, model_runner, grammars=model_runner.grammars), model_runner


def break_token(model: DecoderModel, token_id: int) -> None:
    """Let a model of the Llama family compute NaN for a token; a start cache's weights cannot be changed."""
    whole: Any = model._model if isinstance(model, NativeModel) else model
    with torch.inference_mode():
        whole._embedding.table[token_id] = torch.nan
