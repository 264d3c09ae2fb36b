"""A model runner in another process gives the same results as one in this process; its end is an error."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.drafting_engines import BLOCK, block_bytes, write_first_layers
from helpers.runner_traffic import SETTINGS, make_engine, said, traffic
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import InternalError, StartupError
from naiad.model_runner import ModelRunner
from naiad.model_runner.executor import RemoteRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import MemoryUse
from naiad.sequence import FinishReason, SamplingParams

NUM_BLOCKS = 14
Runner = ModelRunner | RemoteRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"), "LlamaForCausalLM")


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Gemma3ForCausalLM"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma has a group of layers with a window beside the one without."""
    return make_checkpoints(tmp_path_factory.mktemp(request.param), request.param)


def make_checkpoints(directory: Path, architecture: str) -> Path:
    make_tiny_model(directory / "target", architecture)
    write_first_layers(directory / "target", directory / "draft", 1)
    return directory


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    directories = [folder / "target"]
    if settings.get("drafter") == "draft_model":
        settings["draft_model"] = str(folder / "draft")
        directories.append(folder / "draft")
    return EngineConfig(
        model_dir=str(folder / "target"),
        dtype="float32",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        block_size=BLOCK,
        kv_cache_bytes=NUM_BLOCKS * block_bytes(*directories),
        **settings,
    )


@contextmanager
def remote(config: EngineConfig) -> Iterator[RemoteRunner]:
    runner = RemoteRunner(config)
    try:
        yield runner
    finally:
        runner.close()
        assert not psutil.pid_exists(runner.pid)


@pytest.mark.parametrize(
    ("drafter", "overlaps"),
    [("none", False), ("none", True), ("ngram", False), ("draft_model", False), ("self", False)],
)
def test_outputs_are_those_of_a_runner_in_this_process(family: Path, drafter: str, overlaps: bool) -> None:
    config = make_config(family, drafter=drafter)
    here, totals = ModelRunner(config), Counter[str]()
    with remote(config) as there:
        for seed in range(3):
            engine = make_engine(config, here, overlaps)
            expected = traffic(engine, seed)
            made = traffic(make_engine(config, there, overlaps), seed)
            assert {each: said(made[each]) for each in made} == {
                each: said(expected[each]) for each in expected
            }
            totals += Counter(
                hits=engine.stats().total_hit_tokens, preempted=engine.stats().total_preemptions
            )
    assert totals["hits"] > 0
    assert totals["preempted"] > 0


def test_what_it_tells_is_the_runners(folder: Path) -> None:
    config = make_config(folder, drafter="draft_model")
    here = ModelRunner(config)
    with remote(config) as there:
        assert there.model_config.vocab_size == here.model_config.vocab_size
        assert there.model_config.eos_token_ids == tuple(here.model_config.eos_token_ids)
        assert (there.max_model_len, there.kv_groups) == (here.max_model_len, tuple(here.kv_groups))
        assert there.token_budget == here.token_budget
        assert there.memory_use() != MemoryUse()
        assert there.num_late_compiles == 0
        for each in SETTINGS:
            params = SamplingParams(**({"max_tokens": 1} | each))
            assert there.needs_ids(params) == here.needs_ids(params)
        costs = there.measure_step_costs()
        assert len(costs.seconds) == len(here.measure_step_costs().seconds)
        assert there.draft_runner is not None
        assert there.draft_runner.measure_step_costs().seconds


def one_step(sequence_id: int) -> Any:
    params = SamplingParams(max_tokens=4)
    return lone_step([LoneRow(sequence_id, [1, 2, 3], 0, [0], params)])


def test_errors_of_a_row_are_data(folder: Path) -> None:
    """A row for which every token is excluded fails alone, with the same error."""
    config = make_config(folder)
    vocab_size = ModelRunner(config).model_config.vocab_size
    params = SamplingParams(max_tokens=2, bad_words=tuple((each,) for each in range(vocab_size)))
    with remote(config) as there:
        rows = [LoneRow(1, [1, 2], 0, [0], params), LoneRow(2, [1, 2], 0, [1], SamplingParams(max_tokens=2))]
        result = there.launch(lone_step(rows))()
    assert list(result.sampled_token_ids) == [2]
    assert result.errors[1].status == "INVALID_ARG"
    assert "no token is possible" in str(result.errors[1])


def test_cleared_blocks_and_slots_are_zero_there(folder: Path) -> None:
    """The second token after cleared KV equals that after a KV cache of zeros in this process."""
    config = make_config(folder)
    here = ModelRunner(config)

    def logits_after(runner: Runner, name: str = "", numbers: list[list[int]] | None = None) -> bytes:
        params = SamplingParams(max_tokens=4, returns_generation_logits=True)
        runner.launch(lone_step([LoneRow(1, [1, 2, 3], 0, [5], params)]))()
        if name:
            getattr(runner, name)(numbers)
        step = lone_step([LoneRow(2, [1, 2, 3, 4], 3, [5], params)])
        return runner.launch(step)().generation_logits[2][0]

    untouched = logits_after(here)
    with remote(config) as there:
        assert logits_after(there) == untouched
        for name, numbers in (("clear_blocks", [[5]]), ("clear_slots", [[5 * BLOCK, 5 * BLOCK + 1]])):
            cleared = logits_after(there, name, numbers)
            assert cleared == logits_after(here, name, numbers)
            assert cleared != untouched


def test_a_killed_process_is_an_internal_error(folder: Path) -> None:
    with remote(make_config(folder)) as there:
        wait = there.launch(one_step(1))
        assert wait().sampled_token_ids.keys() == {1}
        os.kill(there.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match=r"process has ended \(exit status -9\)"):
            there.launch(one_step(2))()


def test_a_step_that_raises_is_an_internal_error_and_others_go_on(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with remote(make_config(folder)) as there:
        unknown_block = lone_step([LoneRow(1, [1] * 20, 0, [0], SamplingParams(max_tokens=1))])
        with pytest.raises(InternalError, match="a step has failed"):
            there.launch(unknown_block)()
        assert there.launch(one_step(2))().sampled_token_ids.keys() == {2}
    said = capfd.readouterr().err
    assert "a step has failed: ValueError at native/library.py:" in said
    assert "Traceback" not in said


def test_a_bug_of_ours_ends_the_process(folder: Path) -> None:
    """A row skips tokens, which no caller may mistake for a failed step."""
    row = LoneRow(1, [1, 2, 3], 0, [0], SamplingParams(max_tokens=4))
    step = lone_step([row])
    step.rows[0].earlier_token_ids = (1, 2)
    with remote(make_config(folder)) as there, pytest.raises(InternalError, match="process has ended"):
        there.launch(step)()


def test_an_unreadable_answer_is_an_internal_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with remote(make_config(folder)) as there:
        monkeypatch.setattr(there._channel, "receive", lambda: b"no message")
        with pytest.raises(InternalError, match="the model runner's answer cannot be read"):
            there.memory_use()
        assert there._process.wait(10) == -signal.SIGKILL


def test_a_start_that_fails_says_why(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder)
    missing = EngineConfig(model_dir=str(tmp_path), dtype="float32", block_size=config.block_size)
    with pytest.raises(StartupError, match=r"config\.json"):
        RemoteRunner(missing)


def test_the_traffic_ends_in_every_way(folder: Path) -> None:
    config = make_config(folder)
    made = traffic(make_engine(config, ModelRunner(config), overlaps=False), 1)
    reasons = {outputs[-1].finish_reason for outputs in made.values()}
    assert {FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP} <= reasons
