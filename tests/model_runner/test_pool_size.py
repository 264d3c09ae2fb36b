from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import ConfigError
from naiad.model_runner import ModelRunner
from naiad.model_runner.largest_steps import largest_steps
from naiad.model_runner.pool_size import bytes_left, default_cpu_bytes, measured_bytes

GIB = 1 << 30


class FakeMemory:
    """10 GiB, of which a rehearsal takes one for good and one until it is given back."""

    def __init__(self, used_bytes: int) -> None:
        self.used = used_bytes
        self.kept = 0

    def total_bytes(self) -> int:
        return 10 * GIB

    def used_bytes(self) -> int:
        return self.used + self.kept

    def give_back(self) -> None:
        self.kept = 0

    def rehearse(self) -> None:
        self.used += GIB
        self.kept += GIB


def test_the_cache_gets_what_the_fraction_and_the_largest_step_leave() -> None:
    memory = FakeMemory(3 * GIB)
    assert measured_bytes(memory, 0.9, memory.rehearse) == 4 * GIB
    assert memory.used_bytes() == 4 * GIB


@pytest.mark.parametrize("used_bytes", [9 * GIB, 10 * GIB])
def test_a_full_gpu_is_refused_with_what_is_in_use(used_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"^kv_cache_memory_fraction = 0.9: .*{used_bytes / GIB / 10:.3f}"):
        bytes_left(0.9, 10 * GIB, used_bytes)


def test_all_of_the_memory_may_be_asked_for() -> None:
    assert bytes_left(1.0, 10 * GIB, 3 * GIB) == 7 * GIB


@pytest.mark.parametrize(("available", "expected"), [(4 * GIB, GIB), (100 * GIB, 2 * GIB)])
def test_on_a_cpu_a_quarter_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=available))
    assert default_cpu_bytes() == expected


@pytest.mark.parametrize(("num_tokens", "max_model_len"), [(64, 200), (64, 40), (9, 5), (4, 300)])
def test_the_largest_steps_fill_the_budget(num_tokens: int, max_model_len: int) -> None:
    config = EngineConfig(model_dir="m", max_num_seqs=4, num_speculative_tokens=3)
    prompts, texts = largest_steps(config, num_tokens, max_model_len)
    assert prompts.num_scheduled_tokens == num_tokens
    assert texts.num_scheduled_tokens == 4 * min(4, num_tokens // 4)
    for row in texts.scheduled:
        assert row.start + row.num_scheduled_tokens == max_model_len
    for row in (*prompts.scheduled, *texts.scheduled):
        assert len(row.sequence.block_table) * config.block_size >= row.start + row.num_scheduled_tokens


def test_a_rehearsal_computes_every_row_over_one_block(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), dtype="float32", block_size=16, max_num_seqs=4)
    runner = ModelRunner(config)
    prompts, texts = largest_steps(config, 100, runner.max_model_len)
    read = runner.run(prompts)
    assert (len(read.context_logits), read.errors) == (1, {})
    drawn = runner.run(texts)
    assert (set(drawn.sampled_token_ids), drawn.errors) == ({0, 1, 2, 3}, {})
