"""A seeded request gives the same tokens alone, in a batch, after preemptions and in another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import make_tiny_model
from naiad.config import EngineConfig
from naiad.engine import Engine
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.model_runner import ModelRunner
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import EngineRequest, SamplingParams

BLOCK = 16
# Keys and values of three layers of two heads of ten float32.
BLOCK_BYTES = BLOCK * 2 * 3 * 2 * 10 * 4
NEW_TOKENS = 50
PROMPTS = {number: [number * 7 + 1] * (3 + 2 * number) for number in range(5)}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 2.0, "min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "frequency_penalty": 0.5},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_model(directory)
    return directory


def make_engine(model_dir: Path, num_blocks: int = 64, is_cached: bool = True) -> Engine:
    config = EngineConfig(
        model_dir=str(model_dir),
        dtype="float32",
        max_num_batched_tokens=64,
        block_size=BLOCK,
        kv_cache_bytes=num_blocks * BLOCK_BYTES,
    )
    model_runner = ModelRunner(config)
    assert model_runner.num_blocks == num_blocks
    kv_cache = KVCacheManager(num_blocks, BLOCK, PrefixCache(BLOCK) if is_cached else None)
    return Engine(Scheduler(kv_cache, SchedulerLimits(config.max_num_seqs, 64)), model_runner)


def request(number: int, seed: int = 11) -> EngineRequest:
    params = SamplingParams(max_tokens=NEW_TOKENS, seed=seed + number, **SETTINGS[number])
    return EngineRequest(sequence_id=number, prompt_token_ids=PROMPTS[number], params=params)


def run(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for each in requests:
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
    return tokens


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> dict[int, list[int]]:
    engine = make_engine(model_dir, is_cached=False)
    return {number: run(engine, [request(number)])[number] for number in PROMPTS}


def test_another_seed_gives_other_tokens(model_dir: Path, alone: dict[int, list[int]]) -> None:
    assert {len(tokens) for tokens in alone.values()} == {NEW_TOKENS}
    others = run(make_engine(model_dir), [request(number, seed=99) for number in PROMPTS])
    assert all(others[number] != alone[number] for number in PROMPTS)


def test_in_a_batch_of_others(model_dir: Path, alone: dict[int, list[int]]) -> None:
    engine = make_engine(model_dir)
    assert run(engine, [request(number) for number in PROMPTS]) == alone
    assert engine.stats().total_preemptions == 0
    assert run(engine, [request(number) for number in reversed(PROMPTS)]) == alone


@pytest.mark.parametrize("is_cached", [True, False])
def test_after_preemptions(model_dir: Path, alone: dict[int, list[int]], is_cached: bool) -> None:
    """Each sequence grows to four or five blocks, and there are six."""
    engine = make_engine(model_dir, num_blocks=6, is_cached=is_cached)
    assert run(engine, [request(number) for number in PROMPTS]) == alone
    assert engine.stats().total_preemptions > 0
