"""Drafts by a model change no token, and a model's drafts for itself are always accepted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.drafting_engines import break_token, engine_parts, write_first_layers
from helpers.tiny_models import make_tiny_model
from naiad.engine import Engine
from naiad.outputs import ModelOutput, StepBatch
from naiad.sequence import EngineRequest, SamplingParams

NEW_TOKENS = 24
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "num_log_probs": 2},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "returns_context_logits": True},
    {"temperature": 2.0, "min_p": 0.05, "presence_penalty": 1.0},
    {"repetition_penalty": 1.3, "bad_words": ((5,), (6, 7)), "returns_generation_logits": True},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "frequency_penalty": 0.5, "logit_bias": ((3, 2.0),)},
]
PREFIXES = [[(7 * place + start) % 97 for place in range(37)] for start in (1, 2)]
DRAFTERS = ["itself", "first_layer", "another", "self_1", "self_3"]
ALWAYS_RIGHT = ["itself", "self_3"]
MOSTLY_SLOW = ["itself", "self_1", *(pytest.param(each, marks=pytest.mark.slow) for each in DRAFTERS[1:3])]

Tokens = dict[int, list[int]]
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder / "target")
    make_tiny_model(folder / "another", seed=5, num_hidden_layers=2, hidden_size=24, head_dim=12)
    write_first_layers(folder / "target", folder / "first_layer", 1)
    return folder


def settings_of(folder: Path, drafter: str) -> dict[str, Any]:
    if drafter == "none":
        return {}
    if drafter.startswith("self"):
        return {"drafter": "self", "num_draft_layers": int(drafter[-1])}
    return {"drafter": "draft_model", "draft_model": str(folder / drafter.replace("itself", "target"))}


def make_engine(folder: Path, drafter: str, num_speculative_tokens: int = 4, **settings: Any) -> Engine:
    settings |= settings_of(folder, drafter)
    return engine_parts(folder / "target", num_speculative_tokens=num_speculative_tokens, **settings)[0]


def make_requests(num: int) -> list[EngineRequest]:
    """Make requests: some share prefixes, some have siblings, and each has its own settings."""
    requests = []
    for number in range(num):
        length = 3 + 5 * (number % 9)
        prompt = [*(PREFIXES[number % 4] if number % 4 < 2 else []), *([(11 * number + 3) % 97] * length)]
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=number, **SETTINGS[number % len(SETTINGS)])
        first = 10 * number
        siblings = (first + 1, first + 2) if number % 5 == 1 else ()
        requests.append(
            EngineRequest(sequence_id=first, prompt_token_ids=prompt, params=params, sibling_ids=siblings)
        )
    return requests


def run(engine: Engine, requests: list[EngineRequest], cancels: random.Random | None = None) -> Tokens:
    """All tokens; with `cancels`, some requests end early."""
    tokens: Tokens = {each: [] for request in requests for each in request.sequence_ids}
    waiting = list(requests)
    while engine.has_work or waiting:
        for request in waiting[:3]:
            engine.add_request(request)
        del waiting[:3]
        for output in engine.step():
            tokens[output.sequence_id] += output.token_ids
        if cancels is not None and cancels.random() < 0.2:
            engine.abort(cancels.choice(list(tokens)))
    assert engine.stats().num_used_blocks == 0
    return tokens


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tokens:
    return run(make_engine(folder, "none"), make_requests(32))


@pytest.mark.parametrize(("num_requests", "num_speculative_tokens"), [(1, 16), (7, 8), (32, 2)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_without_drafts(
    folder: Path, plain: Tokens, drafter: str, num_requests: int, num_speculative_tokens: int
) -> None:
    engine = make_engine(folder, drafter, num_speculative_tokens)
    made = run(engine, make_requests(num_requests))
    assert made == {each: plain[each] for each in made}
    assert engine.stats().total_drafts > 0
    assert engine.stats().total_draft_failures == 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rounded_copy_drafts_for_the_model_itself(folder: Path, quantization: str) -> None:
    native = {"cpu_kernels": "native"}
    expected = run(make_engine(folder, "none", **native), make_requests(8))
    engine = make_engine(folder, "itself", 4, draft_quantization=quantization, **native)
    assert run(engine, make_requests(8)) == expected
    stats = engine.stats()
    num_accepted = sum(stats.total_accepted_tokens_at)
    # It agrees often, and if nothing were rounded it would agree always.
    assert 0.3 * stats.total_draft_tokens < num_accepted < stats.total_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("num_speculative_tokens", [1, 4, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_of_a_full_batch_are_those_without_drafts(
    folder: Path, plain: Tokens, drafter: str, num_speculative_tokens: int
) -> None:
    engine = make_engine(folder, drafter, num_speculative_tokens, num_blocks=400)
    for _ in range(2):
        assert run(engine, make_requests(32)) == plain
    assert engine.stats().total_preemptions == 0
    assert engine.stats().total_draft_failures == 0


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("drafter", MOSTLY_SLOW)
def test_few_blocks_and_small_steps_change_nothing(
    folder: Path, plain: Tokens, drafter: str, is_cached: bool
) -> None:
    engine = make_engine(folder, drafter, num_blocks=14, budget=24, is_cached=is_cached)
    assert run(engine, make_requests(11)) == {each: plain[each] for each in plain if each < 110}
    stats = engine.stats()
    assert stats.total_preemptions > 0
    assert stats.total_drafts > 0
    assert (stats.total_hit_tokens > 0) == is_cached


@pytest.mark.parametrize("drafter", MOSTLY_SLOW)
def test_cancels_change_nothing_for_others(folder: Path, plain: Tokens, drafter: str) -> None:
    engine = make_engine(folder, drafter, num_blocks=30)
    made = run(engine, make_requests(20), random.Random(3))
    assert all(tokens == plain[each][: len(tokens)] for each, tokens in made.items())
    lengths = {len(tokens) for tokens in made.values()}
    assert NEW_TOKENS in lengths
    assert len(lengths) > 1


@pytest.mark.parametrize("num_blocks", [128, 14])
@pytest.mark.parametrize("drafter", ALWAYS_RIGHT)
def test_a_model_that_drafts_for_itself_is_always_right(folder: Path, drafter: str, num_blocks: int) -> None:
    """Also after preemptions, on blocks from the prefix cache, and for siblings."""
    engine = make_engine(folder, drafter, num_blocks=num_blocks)
    run(engine, make_requests(11))
    stats = engine.stats()
    assert (stats.total_preemptions > 0) == (num_blocks == 14)
    assert stats.total_hit_tokens > 0
    assert sum(stats.total_accepted_tokens_at) == stats.total_draft_tokens > 200


def test_a_window_of_drafts_that_are_right_comes_out_in_one_step(folder: Path) -> None:
    engine = make_engine(folder, "itself", 7)
    engine.add_request(
        EngineRequest(
            sequence_id=1, prompt_token_ids=[4, 5], params=SamplingParams(max_tokens=33, temperature=1.0)
        )
    )
    sizes = [len(output.token_ids) for output in iterate(engine)]
    assert sizes == [1, 8, 8, 8, 8]


def iterate(engine: Engine) -> Iterator[Any]:
    while engine.has_work:
        yield from engine.step()


def test_a_long_text_without_drafts_is_caught_up_in_pieces(folder: Path) -> None:
    """The first drafts are made once the draft model has read all of the text, 256 tokens per step."""
    make_tiny_model(folder / "long", max_position_embeddings=1024)
    settings = {"drafter": "draft_model", "draft_model": str(folder / "long")}
    engine, _ = engine_parts(folder / "long", budget=1024, is_cached=False, **settings)
    prompt = [(7 * place) % 97 for place in range(700)]
    params = SamplingParams(max_tokens=20)
    engine.add_request(EngineRequest(sequence_id=1, prompt_token_ids=prompt, params=params))
    sizes = [len(output.token_ids) for output in iterate(engine)]
    # One step with the prompt, two while 512 tokens are read, then those with drafts.
    assert sizes == [1, 1, 1, 9, 8]


def test_siblings_read_what_they_share_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = engine_parts(folder / "target", **settings_of(folder, "itself"))
    assert runner.draft_runner is not None
    passes: list[int] = []
    run_pass = runner.draft_runner.run

    def counted(output: StepBatch) -> ModelOutput:
        passes.append(output.num_scheduled_tokens)
        return run_pass(output)

    monkeypatch.setattr(runner.draft_runner, "run", counted)
    params = SamplingParams(max_tokens=8, temperature=1.0)
    prompt = [(5 * place) % 97 for place in range(67)]
    siblings = (2, 3, 4)
    engine.add_request(
        EngineRequest(sequence_id=1, prompt_token_ids=prompt, params=params, sibling_ids=siblings)
    )
    list(iterate(engine))
    # The four full blocks of the prompt once, its other three tokens and a new one by each sequence.
    assert max(passes) <= 64 + 4 * (3 + 2)


def out_of_memory(
    run_pass: Callable[[StepBatch], ModelOutput], times: int
) -> Callable[[StepBatch], ModelOutput]:
    """Make a `run` that raises this often, after the work is done."""
    calls = itertools.count(1)

    def failing(output: StepBatch) -> ModelOutput:
        result = run_pass(output)
        if next(calls) <= times:
            raise RuntimeError("out of memory")
        return result

    return failing


@pytest.mark.parametrize("drafter", ALWAYS_RIGHT)
@pytest.mark.parametrize(("times", "num_failures"), [(2, 2), (1000, 3)])
def test_a_draft_model_that_raises_is_done_without(
    folder: Path,
    plain: Tokens,
    drafter: str,
    times: int,
    num_failures: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = engine_parts(folder / "target", **settings_of(folder, drafter))
    assert runner.draft_runner is not None
    monkeypatch.setattr(runner.draft_runner, "run", out_of_memory(runner.draft_runner.run, times))
    made = run(engine, make_requests(12))
    assert made == {each: plain[each] for each in made}
    stats = engine.stats()
    assert stats.total_draft_failures == num_failures
    assert (stats.total_drafts > 0) == (times == 2)
    assert sum(stats.total_accepted_tokens_at) == stats.total_draft_tokens


def test_numbers_that_are_not_finite_end_one_sequences_drafts(folder: Path, plain: Tokens) -> None:
    """The draft model computes NaN for token 3; blocks are reused, because there are few."""
    # A start cache's weights are mapped and cannot be changed.
    settings = settings_of(folder, "itself") | {"start_cache": False}
    engine, runner = engine_parts(folder / "target", num_blocks=14, **settings)
    assert runner.draft_runner is not None
    break_token(runner.draft_runner._model, 3)
    made = run(engine, make_requests(11))
    assert made == {each: plain[each] for each in made}
    stats = engine.stats()
    num_with_3 = sum(3 in tokens for tokens in made.values())
    assert num_with_3 // 2 < stats.total_draft_failures <= len(made)
    assert sum(stats.total_accepted_tokens_at) == stats.total_draft_tokens > 0


def test_a_client_may_want_fewer_or_none(folder: Path) -> None:
    engine = make_engine(folder, "itself", 8)
    for number, asked in enumerate((0, 3)):
        params = SamplingParams(max_tokens=21, num_draft_tokens=asked)
        engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=[1, 2], params=params))
    sizes: dict[int, list[int]] = {0: [], 1: []}
    for output in iterate(engine):
        sizes[output.sequence_id].append(len(output.token_ids))
    assert sizes == {0: [1] * 21, 1: [1, 4, 4, 4, 4, 4]}


def test_a_clients_own_draft_goes_first(folder: Path) -> None:
    engine = make_engine(folder, "first_layer", 4)
    params = SamplingParams(max_tokens=16)
    expected = run(engine, [EngineRequest(sequence_id=1, prompt_token_ids=[9, 8], params=params)])[1]
    before = sum(engine.stats().total_accepted_tokens_at)
    offered = tuple(expected)
    request = EngineRequest(sequence_id=2, prompt_token_ids=[9, 8], params=params, draft_token_ids=offered)
    assert run(engine, [request])[2] == expected
    # Windows of five draft tokens; the last one has the rest.
    assert sum(engine.stats().total_accepted_tokens_at) - before == 4 * 3
