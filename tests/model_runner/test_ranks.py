"""A model split over several processes gives the tokens of one process; ranks live and die together."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.drafting_engines import BLOCK, block_bytes
from helpers.engine_harness import Recorder, has_ended, make_request, wait_until
from helpers.runner_traffic import make_engine, traffic
from helpers.tiny_models import make_tiny_model
from helpers.tiny_repository import tiny_checkpoint
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.errors import ConfigError, InternalError, ModelError
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import ModelOutput, RequestOutput
from naiad.sequence import SamplingParams

NUM_BLOCKS = 14
# A token whose embedding is not finite.
BAD_ID = 90
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine heads and three KV heads, as SmolLM2-135M has."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tiny_model(folder, num_attention_heads=9, num_key_value_heads=3)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_ID] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_config(folder: Path, size: int, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model_dir=str(folder),
        dtype="float32",
        cpu_kernels="torch",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        block_size=BLOCK,
        kv_cache_bytes=NUM_BLOCKS * block_bytes(folder),
        tensor_parallel_size=size,
        **settings,
    )


@contextmanager
def split(folder: Path, size: int, **settings: Any) -> Iterator[ModelRunner]:
    runner = ModelRunner(make_config(folder, size, **settings))
    pids = child_pids(os.getpid())
    assert len(pids) == size - 1
    try:
        yield runner
    finally:
        runner.close()
        assert not any(map(psutil.pid_exists, pids))


def child_pids(pid: int) -> list[int]:
    """The rank processes below a process."""
    children = psutil.Process(pid).children()
    return [each.pid for each in children if "naiad.model_runner.ranks" in each.cmdline()]


@pytest.fixture(scope="module", params=[2, 3])
def runners(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """The model in this process alone, and split over some."""
    with split(folder, request.param) as there:
        yield ModelRunner(make_config(folder, 1)), there


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [each for output in outputs for each in output.token_ids]


def logits_of(outputs: list[RequestOutput]) -> torch.Tensor:
    parts = [output.context_logits for output in outputs]
    parts += [each for output in outputs for each in output.generation_logits]
    return torch.frombuffer(bytearray(b"".join(parts) or bytes(4)), dtype=torch.float32)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_outputs_are_those_of_one_process(
    folder: Path, runners: tuple[ModelRunner, ModelRunner], drafter: str
) -> None:
    """With parts of prompts, prefix hits, preemption, beams, siblings and every way of sampling."""
    here, there = runners
    config = make_config(folder, 1, drafter=drafter)
    assert there.kv_groups == here.kv_groups
    totals = Counter[str]()
    for seed in range(2):
        engine = make_engine(config, here, overlaps=False)
        expected = traffic(engine, seed)
        made = traffic(make_engine(config, there, overlaps=False), seed)
        assert made.keys() == expected.keys()
        for sequence_id, outputs in made.items():
            others = expected[sequence_id]
            assert token_ids(outputs) == token_ids(others)
            assert outputs[-1].finish_reason == others[-1].finish_reason
            torch.testing.assert_close(logits_of(outputs), logits_of(others), rtol=0, atol=1e-4)
        stats = engine.stats()
        totals += Counter(
            hits=stats.total_hit_tokens,
            preempted=stats.total_preemptions,
            accepted=sum(stats.total_accepted_tokens_at),
        )
    assert totals["hits"] > 0
    assert totals["preempted"] > 0
    assert (totals["accepted"] > 0) == (drafter == "ngram")


def logits_after(runner: ModelRunner, row: LoneRow) -> torch.Tensor:
    output = runner.launch(lone_step([row]))()
    return torch.frombuffer(bytearray(output.generation_logits[row.sequence_id][0]), dtype=torch.float32)


PARAMS = SamplingParams(max_tokens=4, returns_generation_logits=True)


def test_blocks_are_cleared_at_every_rank(runners: tuple[ModelRunner, ModelRunner]) -> None:
    """The fourth token after cleared KV has the logits that it has after a KV cache of zeros."""
    here, there = runners
    fourth = LoneRow(2, [1, 2, 3, 4], 3, [5], PARAMS)

    def after(runner: ModelRunner, clear: str, numbers: list[list[int]]) -> torch.Tensor:
        runner.launch(lone_step([LoneRow(1, [1, 2, 3], 0, [5], PARAMS)]))()
        getattr(runner, clear)(numbers)
        return logits_after(runner, fourth)

    whole = after(here, "clear_slots", [[]])
    for clear, numbers in (("clear_blocks", [[5]]), ("clear_slots", [[5 * BLOCK, 5 * BLOCK + 1]])):
        cleared = after(there, clear, numbers)
        torch.testing.assert_close(cleared, after(here, clear, numbers), rtol=0, atol=1e-4)
        assert (cleared - whole).abs().max() > 0.01


def test_a_draft_that_is_not_finite_does_not_make_its_row_fail(
    runners: tuple[ModelRunner, ModelRunner],
) -> None:
    """The row is computed again without its drafts, at every rank."""
    rows = [
        LoneRow(1, [1, 2, 3], 0, [0], PARAMS, draft_token_ids=(4, BAD_ID)),
        LoneRow(2, [5, 6], 0, [1], PARAMS),
        LoneRow(3, [5, BAD_ID], 0, [2], PARAMS),
    ]
    outputs: list[ModelOutput] = []
    for runner in runners:
        outputs.append(runner.launch(lone_step(rows))())
        runner.clear_blocks([[2]])
    assert outputs[0].sampled_token_ids.keys() == {1, 2}
    assert outputs[1].sampled_token_ids == outputs[0].sampled_token_ids
    assert isinstance(outputs[1].errors[3], InternalError)
    # What was cached for the known tokens is right.
    again = [logits_after(runner, LoneRow(1, [1, 2, 3, 4], 3, [0], PARAMS)) for runner in runners]
    torch.testing.assert_close(again[1], again[0], rtol=0, atol=1e-4)


def test_ranks_listen_on_loopback_only(runners: tuple[ModelRunner, ModelRunner]) -> None:
    addresses = {
        connection.laddr.ip
        for pid in (os.getpid(), *child_pids(os.getpid()))
        for connection in psutil.Process(pid).net_connections("inet")
    }
    assert addresses == {"127.0.0.1"}


def test_a_start_that_fails_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: torch.zeros(36, 50)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor '{name}' has shape \(36, 50\)"):
        ModelRunner(make_config(tmp_path, 2))
    assert child_pids(os.getpid()) == []


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    config_path = tmp_path / "config.json"
    text = config_path.read_text(encoding="utf-8").rstrip().removesuffix("}")
    quantised = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    config_path.write_text(f"{text}, {quantised}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size = 2: expected 1: .* are quantised"):
        ModelRunner(make_config(tmp_path, 2))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[EngineClient, Recorder]]:
    """An engine process with two more ranks."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="naiad-test-") as directory:
        checkpoint = tiny_checkpoint(Path(directory) / "checkpoint")
        config = EngineConfig(
            model_dir=str(checkpoint),
            dtype="float32",
            max_num_batched_tokens=64,
            kv_cache_bytes=1 << 24,
            tensor_parallel_size=3,
        )
        socket_path = Path(directory) / "llm.engine"
        client = EngineClient(config, socket_path, recorder.on_outputs, recorder.on_lost)
        client.start()
        yield client, recorder
        client.close(timeout_s=0)


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_death_of_a_rank_ends_all_and_the_engine_restarts(
    served: tuple[EngineClient, Recorder], rank: int, is_busy: bool
) -> None:
    client, recorder = served
    first_id, num_losses = 100 * (1 + 2 * rank + is_busy), recorder.num_losses
    client.submit([make_request(first_id, 5, NUM_TOKENS)])
    recorder.wait_finished(first_id)
    engine = client.pid
    assert engine is not None
    pids = [engine, *child_pids(engine)]
    assert len(pids) == 3
    if is_busy:
        client.submit([make_request(first_id + 1, 5, 4000)])
        recorder.wait_started(first_id + 1)
    os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, pids)))
    recorder.wait_for(lambda: recorder.num_losses > num_losses)
    wait_until(lambda: client.is_ready)
    client.submit([make_request(first_id + 2, 5, NUM_TOKENS)])
    recorder.wait_finished(first_id + 2)
    assert recorder.token_ids(first_id + 2) == recorder.token_ids(first_id)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_eight_and_sixteen_bits_stay_close(folder: Path, settings: dict[str, str]) -> None:
    row = LoneRow(1, list(range(40)), 0, [0, 1, 2], PARAMS)
    config = make_config(folder, 1)
    expected = logits_after(ModelRunner(replace(config, **settings)), row)
    runner = ModelRunner(replace(config, tensor_parallel_size=2, **settings))
    try:
        logits = logits_after(runner, row)
    finally:
        runner.close()
    # Scales are those of whole heads, so codes are the same; sums of bfloat16 are rounded at each rank.
    tolerance = 1e-3 if "kv_cache_dtype" in settings else 0.05 * float(expected.std())
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_default_model_makes_the_same_tokens(default_model_dir: Path, size: int) -> None:
    """Nine heads and three KV heads: two ranks have two KV heads and one."""
    config = EngineConfig(
        model_dir=str(default_model_dir),
        dtype="float32",
        cpu_kernels="torch",
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 26,
        start_cache=False,
    )

    def generate(runner: ModelRunner) -> tuple[list[int], torch.Tensor]:
        known, logits = list(range(100, 130)), []
        for start in (0, *range(30, 50)):
            row = LoneRow(1, list(known), start, [0], PARAMS)
            output = runner.launch(lone_step([row]))()
            known += output.sampled_token_ids[1]
            logits.append(output.generation_logits[1][0])
        return known, torch.frombuffer(bytearray(b"".join(logits)), dtype=torch.float32)

    expected_ids, expected = generate(ModelRunner(config))
    runner = ModelRunner(replace(config, tensor_parallel_size=size))
    try:
        token_ids, logits = generate(runner)
    finally:
        runner.close()
    assert token_ids == expected_ids
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
