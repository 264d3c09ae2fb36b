"""The first start, later starts and starts without the cache compute the same logits, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.array_files import Arrays, Notes, rewrite
from helpers.tiny_models import ARCHITECTURES, make_tiny_model
from naiad.config import EngineConfig
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.models import packed_weights, registry
from naiad.sequence import SamplingParams

PROMPT = [(7 * place + 3) % 96 for place in range(40)]


def prompt_logits(model_dir: Path, dtype: str, *, start_cache: bool, **settings: Any) -> bytes:
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype=dtype,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_bytes=1 << 22,
        start_cache=start_cache,
        **settings,
    )
    params = SamplingParams(max_tokens=1, returns_context_logits=True)
    output = ModelRunner(config).run(lone_step([LoneRow(1, PROMPT, 0, [0], params)]))
    return output.context_logits[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_the_same_with_and_without_the_cache(
    tmp_path: Path, architecture: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path, architecture)
    plain = prompt_logits(tmp_path, dtype, start_cache=False)
    assert len(plain) == 4 * len(PROMPT) * 97
    first = prompt_logits(tmp_path, dtype, start_cache=True)
    if list(tmp_path.rglob("*.weights")):  # else torch computes, whose weights cannot be kept
        monkeypatch.setattr(registry, "Checkpoint", None)
        monkeypatch.setattr(packed_weights, "Checkpoint", None)
    assert plain == first == prompt_logits(tmp_path, dtype, start_cache=True)


def test_logits_are_the_checkpoints_beside_weights_that_do_not_fit(tmp_path: Path) -> None:
    """Native code would write the outputs of surplus panels beyond each row."""
    make_tiny_model(tmp_path)
    plain = prompt_logits(tmp_path, "float32", start_cache=True, cpu_kernels="native")

    def double(arrays: Arrays, notes: Notes) -> None:
        name = "model.layers.1.mlp.down_proj/panels"
        arrays[name] = torch.cat([arrays[name]] * 2)

    files = list(tmp_path.rglob("*.weights"))
    assert files
    for path in files:
        whole = path.read_bytes()
        rewrite(path, double)
        assert prompt_logits(tmp_path, "float32", start_cache=True, cpu_kernels="native") == plain
        assert path.read_bytes() == whole
