"""Drafts change no token of the default model, whatever else happens in the engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import transformers

from helpers.drafting_engines import write_first_layers
from helpers.drafts import draft_sequence
from naiad.config import EngineConfig
from naiad.engine import Engine, build_engine
from naiad.engine.build import make_drafter
from naiad.model_runner.draft_choice import chosen_drafter
from naiad.sequence import EngineRequest, SamplingParams
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.step_cost import StepCost
from naiad_kernels.native.variants import best_variant

BLOCK_BYTES = 16 * 46080
TEXTS = (
    "Repeat these numbers: 1, 2, 3, 4, 5, 6, 7, 8. Again: 1, 2, 3, 4, 5, 6, 7, 8. Again:",
    '{"name": "Alice", "age": 25}, {"name": "Bob", "age": 25}, {"name": "Carol", "age":',
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Once upon a time there was",
)
SAMPLING: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02},
)
NUM_REQUESTS, NUM_TOKENS = 32, 24
NUM_LAYERS, NUM_DRAFT_LAYERS = 30, 24


@lru_cache(maxsize=1)
def requests(model_dir: Path) -> list[EngineRequest]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    made = []
    for number in range(NUM_REQUESTS):
        text = f"{number}. {TEXTS[number % len(TEXTS)]}"
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, **SAMPLING[number % len(SAMPLING)])
        prompt = tokenizer(text)["input_ids"]
        made.append(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))
    return made


def make_engine(
    model_dir: Path, num_blocks: int, num_block_bytes: int = BLOCK_BYTES, **settings: Any
) -> Engine:
    return build_engine(
        EngineConfig(
            model_dir=str(model_dir),
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=64,
            block_size=16,
            kv_cache_bytes=num_blocks * num_block_bytes,
            **{"dtype": "float32", **settings},
        )
    )


def make_drafting_engine(
    model_dir: Path, draft_dir: Callable[[], Path], num_blocks: int, drafter: str, num_tokens: int
) -> Engine:
    """Make an engine that verifies all drafts, as if they cost nothing."""
    settings: dict[str, Any] = {"drafter": drafter, "num_speculative_tokens": num_tokens}
    num_block_bytes = BLOCK_BYTES
    if drafter == "self":
        settings["num_draft_layers"] = NUM_DRAFT_LAYERS
    elif drafter == "draft_model":
        settings["draft_model"] = str(draft_dir())
        num_block_bytes += BLOCK_BYTES * NUM_DRAFT_LAYERS // NUM_LAYERS
    engine = make_engine(model_dir, num_blocks, num_block_bytes, **settings)
    assert engine._scheduler.kv_cache.num_blocks == num_blocks
    speculator = engine._scheduler.speculator
    assert speculator is not None
    speculator._policy = SpeculationPolicy(StepCost([(1, 1.0), (1 << 16, 1.0)]))
    return engine


def run(engine: Engine, asked: list[EngineRequest], cancelled: dict[int, int]) -> dict[int, list[int]]:
    """Tokens by sequence id; `cancelled` maps sequences to the step in which they are aborted."""
    for request in asked:
        engine.add_request(request)
    tokens: dict[int, list[int]] = {request.sequence_id: [] for request in asked}
    step = 0
    while engine.has_work:
        for output in engine.step():
            tokens[output.sequence_id] += output.token_ids
        step += 1
        for sequence_id in [each for each, when in cancelled.items() if when == step]:
            engine.abort(sequence_id)
    assert engine.stats().num_used_blocks == 0
    return tokens


@pytest.fixture(scope="module")
def draft_dir(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Writes the draft model once, when a test needs it."""
    target = tmp_path_factory.mktemp("draft") / "model"
    return lru_cache(lambda: write_first_layers(default_model_dir, target, NUM_DRAFT_LAYERS))


@pytest.fixture(scope="module")
def plain(default_model_dir: Path) -> Engine:
    return make_engine(default_model_dir, 400, drafter="none")


@pytest.fixture(scope="module")
def expected(default_model_dir: Path, plain: Engine) -> Callable[[int], dict[int, list[int]]]:
    """The tokens of the first requests without drafts."""
    return lru_cache(lambda num_requests: run(plain, requests(default_model_dir)[:num_requests], {}))


# 16 blocks hold four of these texts, so some of eight are preempted.
@pytest.mark.parametrize("num_blocks", [pytest.param(400, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize(
    ("num_speculative_tokens", "batch", "num_requests"),
    [
        (4, 8, 8),
        *(
            pytest.param(num_tokens, batch, num_requests, marks=pytest.mark.slow)
            for num_tokens, batch, num_requests in (
                *((1, 32, 32), (2, 8, 16), (3, 1, 8)),
                *((8, 8, 16), (16, 1, 8), (16, 32, 32)),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "drafter",
    ["ngram", "suffix", *(pytest.param(each, marks=pytest.mark.slow) for each in ("draft_model", "self"))],
)
def test_drafts_change_no_token(
    default_model_dir: Path,
    draft_dir: Callable[[], Path],
    expected: Callable[[int], dict[int, list[int]]],
    drafter: str,
    num_speculative_tokens: int,
    batch: int,
    num_requests: int,
    num_blocks: int,
) -> None:
    engine = make_drafting_engine(default_model_dir, draft_dir, num_blocks, drafter, num_speculative_tokens)
    asked = requests(default_model_dir)[:num_requests]
    draw = random.Random(f"{drafter} {num_speculative_tokens} {batch}")
    for start in range(0, len(asked), batch):
        group = asked[start : start + batch]
        cancelled = {each.sequence_id: draw.randrange(1, 12) for each in group if draw.random() < 0.15}
        tokens = run(engine, group, cancelled)
        for sequence_id, made in tokens.items():
            whole = expected(num_requests)[sequence_id]
            assert made == (whole[: len(made)] if sequence_id in cancelled else whole)
    stats = engine.stats()
    assert sum(stats.total_accepted_tokens_at) > 0
    assert num_blocks > 16 or batch == 1 or stats.total_preemptions > 0


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_default_drafts_change_no_token_in_bfloat16(default_model_dir: Path, quantization: str) -> None:
    """Native kernels compute a row's bits as if it were alone, so drafts are on by default."""
    made = {}
    for drafter in ("none", "auto"):
        settings = {"dtype": "bfloat16", "quantization": quantization, "drafter": drafter}
        engine = make_engine(default_model_dir, 400, cpu_kernels="native", **settings)
        speculator = engine._scheduler.speculator
        assert speculator is not None
        speculator._policy = SpeculationPolicy(StepCost([(1, 1.0), (1 << 16, 1.0)]))
        made[drafter] = run(engine, requests(default_model_dir)[:8], {})
    assert made["auto"] == made["none"]
    assert sum(engine.stats().total_accepted_tokens_at) > 0


@pytest.mark.skipif(best_variant() is None, reason="this CPU has no AVX2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_codes_in_the_kv_cache_neither_drafts_nor_preemption_change_a_token(
    default_model_dir: Path, dtype: str
) -> None:
    """Codes and scales are copied, cleared and reused together."""
    made, num_layer_bytes = {}, 2 * 3 * 16 * (64 + 4)
    for drafter, num_blocks in (("none", 400), ("suffix", 400), ("suffix", 16)):
        settings = {"dtype": dtype, "kv_cache_dtype": "int8", "drafter": drafter, "cpu_kernels": "native"}
        engine = make_engine(default_model_dir, num_blocks, NUM_LAYERS * num_layer_bytes, **settings)
        assert engine._scheduler.kv_cache.num_blocks == num_blocks
        speculator = engine._scheduler.speculator
        assert speculator is not None
        speculator._policy = SpeculationPolicy(StepCost([(1, 1.0), (1 << 16, 1.0)]))
        made[drafter, num_blocks] = run(engine, requests(default_model_dir)[:8], {})
    assert made["suffix", 400] == made["suffix", 16] == made["none", 400]
    stats = engine.stats()
    assert sum(stats.total_accepted_tokens_at) > 0
    assert stats.total_preemptions > 0


@pytest.mark.parametrize(("num_kept", "draft"), [(0, []), (4, []), (64, [4, 5])])
def test_the_engine_says_how_much_of_ended_outputs_is_kept(num_kept: int, draft: list[int]) -> None:
    config = EngineConfig(model_dir="m", drafter="suffix", max_shared_draft_tokens=num_kept)
    drafter = make_drafter(config, Mock(draft_runner=None), Mock())
    assert drafter is not None
    drafter.forget(draft_sequence([0], [1, 2, 3, 4, 5]))
    assert drafter.propose([draft_sequence([1, 2, 3])], [2]) == [draft]


@pytest.mark.parametrize(
    ("drafter", "is_native", "chosen"),
    [
        ("auto", True, "suffix"),
        ("auto", False, "none"),
        ("none", True, "none"),
        ("ngram", True, "ngram"),
        ("ngram", False, "ngram"),
    ],
)
def test_the_drafter_by_default(drafter: str, is_native: bool, chosen: str) -> None:
    assert chosen_drafter(EngineConfig(model_dir="m", drafter=drafter), is_native) == chosen
