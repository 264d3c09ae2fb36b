from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import StartupError
from naiad.model_runner import ModelRunner
from naiad.model_runner.paged_model import PagedModel
from naiad.model_runner.rehearsal import every_kind_of_step, largest_steps
from naiad.outputs import ModelOutput, StepBatch


@pytest.mark.parametrize(("num_tokens", "max_model_len"), [(64, 200), (64, 40), (9, 5), (4, 300)])
def test_the_largest_steps_fill_the_budget(num_tokens: int, max_model_len: int) -> None:
    config = EngineConfig(model_dir="m", max_num_seqs=4, num_speculative_tokens=3)
    prompts, texts = largest_steps(config, num_tokens, max_model_len)
    assert prompts.num_scheduled_tokens == num_tokens
    assert texts.num_scheduled_tokens == 4 * min(4, num_tokens // 4)
    for row in texts.rows:
        assert row.end == max_model_len
    for row in (*prompts.rows, *texts.rows):
        assert len(row.block_changes[0].block_ids) * config.block_size >= row.end


def test_a_rehearsal_computes_every_row_over_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path)
    config = EngineConfig(
        model_dir=str(tmp_path), dtype="float32", block_size=16, max_num_seqs=4, cpu_kernels="torch"
    )
    runner = ModelRunner(config)
    seen: list[tuple[StepBatch, ModelOutput]] = []
    run = ModelRunner.run.__get__(runner)
    monkeypatch.setattr(
        "naiad.model_runner.paged_model.PagedModel.run",
        lambda self, step: seen.append((step, run(step))),
    )
    runner._rehearse(config, [runner._model])
    kinds = every_kind_of_step(runner._layout, runner.max_model_len)
    assert [step.num_scheduled_tokens for step, _ in seen[:-2]] == [k.num_scheduled_tokens for k in kinds]
    assert len(seen) == len(kinds) + 2
    for step, result in seen:
        assert result.errors == {}
        assert set(result.sampled_token_ids) == {row.sequence_id for row in step.rows}
    assert len(seen[-2][1].context_logits) == len(seen[-2][0].rows)


def test_the_largest_steps_come_after_every_capture_and_are_no_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path)
    config = EngineConfig(
        model_dir=str(tmp_path), dtype="float32", block_size=16, max_num_seqs=4, cpu_kernels="torch"
    )
    runner = ModelRunner(config)
    captured: list[PagedModel] = []
    computed: list[PagedModel] = []
    monkeypatch.setattr(runner, "_capture_graphs", lambda _, paged_model: captured.append(paged_model))

    def run(paged_model: PagedModel, step: StepBatch) -> None:
        # A later capture would release this step's memory before it is measured.
        assert len(captured) == 2
        computed.append(paged_model)

    monkeypatch.setattr(PagedModel, "run", run)
    assert runner._rehearse(config, [runner._model, runner._model.first_layers(1)]) == captured
    assert len(set(computed)) == 2
    assert set(computed).isdisjoint(captured)


@pytest.mark.parametrize("kv_cache_bytes", [0, 1 << 26])
def test_a_largest_step_that_does_not_fit_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_bytes: int
) -> None:
    make_tiny_model(tmp_path)
    config = EngineConfig(
        model_dir=str(tmp_path), dtype="float32", kv_cache_bytes=kv_cache_bytes, cpu_kernels="torch"
    )
    runner = ModelRunner(config)

    def rehearse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "_rehearse", rehearse)
    runner.device = torch.device("cuda")
    with pytest.raises(StartupError, match="lower max_num_batched_tokens or max_num_seqs"):
        runner._choose_kv_cache_bytes(config, [runner._model], runner._model.config, 0)
