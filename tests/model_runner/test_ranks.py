"""A model split over several processes gives the tokens of one process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.drafting_engines import BLOCK, block_bytes
from helpers.runner_traffic import make_engine, traffic
from helpers.split_outputs import logits_of, token_ids
from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.errors import InternalError
from naiad.model_runner import ModelRunner
from naiad.model_runner.lone_steps import LoneRow, lone_step
from naiad.outputs import ModelOutput
from naiad.sequence import FinishReason, SamplingParams

NUM_BLOCKS = 14
# A token whose embedding is not finite.
BAD_ID = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine heads and three KV heads, as SmolLM2-135M has."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tiny_model(folder, num_attention_heads=9, num_key_value_heads=3)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_ID] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_config(folder: Path, size: int, stages: int = 1, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model_dir=str(folder),
        dtype="float32",
        cpu_kernels="torch",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        block_size=BLOCK,
        kv_cache_bytes=NUM_BLOCKS * block_bytes(folder),
        tensor_parallel_size=size,
        pipeline_parallel_size=stages,
        **settings,
    )


@contextmanager
def split(folder: Path, size: int, stages: int) -> Iterator[ModelRunner]:
    runner = ModelRunner(make_config(folder, size, stages))
    pids = child_pids(os.getpid())
    assert len(pids) == size * stages - 1
    try:
        yield runner
    finally:
        runner.close()
        assert not any(map(psutil.pid_exists, pids))


def child_pids(pid: int) -> list[int]:
    """The rank processes below a process."""
    children = psutil.Process(pid).children()
    return [each.pid for each in children if "naiad.model_runner.ranks" in each.cmdline()]


@pytest.fixture(scope="module", params=[(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)], ids="{0[0]} x {0[1]}".format)
def runners(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """The model in this process alone, and split over some."""
    with split(folder, *request.param) as there:
        yield ModelRunner(make_config(folder, 1)), there


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


def test_the_traffic_ends_in_every_way(folder: Path) -> None:
    config = make_config(folder, 1)
    made = traffic(make_engine(config, ModelRunner(config), overlaps=False), 1)
    reasons = {outputs[-1].finish_reason for outputs in made.values()}
    assert {FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP} <= reasons
