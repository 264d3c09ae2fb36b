"""A model runner in another process gives the same results as one in this process; its end is an error."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.drafting_engines import BLOCK, block_bytes, write_first_layers
from helpers.engine_drive import CheckedScheduler
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.engine.build import make_drafter, make_kv_cache
from naiad.errors import InternalError, StartupError
from naiad.model_runner import ModelRunner
from naiad.model_runner.executor import RemoteRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import MemoryUse, RequestOutput
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import BeamParams, EngineRequest, FinishReason, SamplingParams
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost

NUM_BLOCKS = 14
NUM_OPERATIONS = 90
Runner = ModelRunner | RemoteRunner
Made = dict[int, list[RequestOutput]]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"stop_token_ids": tuple(range(0, 90, 2))},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "stop_token_ids": tuple(range(5, 50))},
    {"temperature": 0.8, "top_p": 0.9, "logit_bias": ((3, 2.0), (4, -1.0)), "num_log_probs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"bad_words": ((3,), (4, 5)), "returns_generation_logits": True},
    {"allowed_token_ids": (), "returns_context_logits": True, "max_tokens": 4},
]


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


def make_engine(config: EngineConfig, runner: Runner, overlaps: bool) -> Engine:
    kv_cache = make_kv_cache(config, runner.kv_groups, 48)
    drafter = make_drafter(config, runner, kv_cache)
    # All steps cost the same, so all drafts are verified.
    policy = SpeculationPolicy(StepCost([(1, 1.0), (1 << 16, 1.0)]))
    speculator = None if config.drafter == "none" else Speculator(drafter, policy, 4)
    scheduler = CheckedScheduler(kv_cache, SchedulerLimits(6, 48), speculator=speculator)
    return Engine(scheduler, runner, clock=lambda: 0.0, overlaps=overlaps)


def traffic(engine: Engine, seed: int) -> Made:
    """Run random requests of all kinds, with aborts; return each sequence's outputs."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(90) for _ in range(50)] for _ in range(2)]
    made: Made = defaultdict(list)
    next_id = 0
    for _ in range(NUM_OPERATIONS):
        roll = rng.random()
        if roll < 0.3:
            request = _request(rng, next_id, prefixes)
            next_id += len(request.sequence_ids)
            engine.add_request(request)
        elif roll < 0.34 and next_id:
            aborted = engine.abort(rng.randrange(next_id))
            if aborted is not None:
                made[aborted.sequence_id].append(aborted)
        else:
            for output in engine.step():
                made[output.sequence_id].append(output)
    while engine.has_work:
        for output in engine.step():
            made[output.sequence_id].append(output)
    assert engine.stats().num_used_blocks == 0
    assert len(made) == next_id
    return made


def _request(rng: random.Random, first_id: int, prefixes: list[list[int]]) -> EngineRequest:
    shared = rng.choice(prefixes)[: rng.randrange(50)]
    prompt = shared + [rng.randrange(90) for _ in range(rng.randint(1, 30))]
    settings = {"max_tokens": rng.randint(1, 25), "seed": rng.randrange(1 << 60)} | rng.choice(SETTINGS)
    num_siblings = rng.choice((0, 0, 0, 1, 2))
    params = SamplingParams(**settings)
    beam = None
    if num_siblings and rng.random() < 0.5:
        params = SamplingParams(max_tokens=rng.randint(1, 12))
        beam = BeamParams()
    return EngineRequest(
        sequence_id=first_id,
        prompt_token_ids=prompt,
        params=params,
        sibling_ids=tuple(range(first_id + 1, first_id + 1 + num_siblings)),
        beam=beam,
    )


def said(outputs: list[RequestOutput]) -> tuple[Any, ...]:
    """Everything that a sequence's client receives."""
    return (
        [each for output in outputs for each in output.token_ids],
        [each for output in outputs for each in output.log_probs],
        b"".join(output.context_logits for output in outputs),
        [each for output in outputs for each in output.generation_logits],
        outputs[-1].finish_reason,
        outputs[-1].error_message,
    )


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


def test_a_step_that_raises_is_an_internal_error_and_others_go_on(folder: Path) -> None:
    with remote(make_config(folder)) as there:
        unknown_block = lone_step([LoneRow(1, [1] * 20, 0, [0], SamplingParams(max_tokens=1))])
        with pytest.raises(InternalError, match="a step has failed"):
            there.launch(unknown_block)()
        assert there.launch(one_step(2))().sampled_token_ids.keys() == {2}


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
