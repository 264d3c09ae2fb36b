"""Gemma's greedy tokens equal those of transformers, whatever the engine does with blocks and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.drafting_engines import engine_parts
from helpers.tiny_models import make_tiny_model
from naiad.engine import Engine
from naiad.outputs import RequestOutput
from naiad.sequence import BeamParams, EngineRequest, KVRetention, SamplingParams

NEW_TOKENS = 24
# The window is 21 tokens: prompts end before, at and after its edge; two begin alike.
COMMON = [(7 * place + 3) % 96 for place in range(40)]
PROMPTS = [
    [5],
    [(3 * place + 1) % 96 for place in range(20)],
    [(3 * place + 2) % 96 for place in range(21)],
    [11, 12, 13, 14, 15, 16] * 9,
    [*COMMON, 1, 2, 3],
    [*COMMON, 4, 5],
    [(5 * place * place) % 96 for place in range(90)],
]
Tokens = list[list[int]]


@pytest.fixture(scope="module", params=["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokens]:
    """A checkpoint, and the tokens that transformers generates for each prompt."""
    directory = tmp_path_factory.mktemp(request.param)
    model = make_tiny_model(directory, request.param)
    return directory, [continuation(model, prompt) for prompt in PROMPTS]


def continuation(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    ids = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def run(engine: Engine, num_at_once: int = len(PROMPTS)) -> Tokens:
    tokens: Tokens = [[] for _ in PROMPTS]
    waiting = [
        EngineRequest(
            sequence_id=number,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=NEW_TOKENS),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    while engine.has_work or waiting:
        for request in waiting[:num_at_once]:
            engine.add_request(request)
        del waiting[:num_at_once]
        for output in engine.step():
            tokens[output.sequence_id] += output.token_ids
    assert engine.stats().num_used_blocks == 0
    return tokens


@pytest.mark.parametrize("budget", [256, 17])
def test_tokens_equal_transformers_in_any_chunks(gemma: tuple[Path, Tokens], budget: int) -> None:
    directory, expected = gemma
    assert run(engine_parts(directory, budget=budget)[0]) == expected


def test_preempted_texts_go_on_as_if_nothing_had_happened(gemma: tuple[Path, Tokens]) -> None:
    directory, expected = gemma
    engine, _ = engine_parts(directory, num_blocks=12, budget=64)
    assert run(engine) == expected
    assert engine.stats().total_preemptions > 0


def test_a_prefix_hit_changes_no_token(gemma: tuple[Path, Tokens]) -> None:
    directory, expected = gemma
    engine, _ = engine_parts(directory)
    assert run(engine) == expected
    num_hits = engine.stats().total_hit_tokens
    assert run(engine, num_at_once=1) == expected
    assert engine.stats().total_hit_tokens > num_hits + 100


@pytest.mark.parametrize("num_blocks", [128, 14])
@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "ngram"},
        {"drafter": "self", "num_draft_layers": 1},
        {"drafter": "self", "num_draft_layers": 3},
    ],
    ids=["ngram", "self_1", "self_3"],
)
def test_drafts_change_no_token(
    gemma: tuple[Path, Tokens], settings: dict[str, Any], num_blocks: int
) -> None:
    directory, expected = gemma
    engine, _ = engine_parts(directory, num_blocks=num_blocks, budget=64, **settings)
    assert run(engine) == expected
    assert engine.stats().total_drafts > 0
    assert engine.stats().total_draft_failures == 0


def test_windowed_groups_hold_few_blocks(gemma: tuple[Path, Tokens]) -> None:
    """Checked after every step: no more blocks than a window of 21 tokens and a step of 17 may touch."""
    directory, expected = gemma
    engine, runner = engine_parts(directory, budget=17)
    assert [group.window for group in runner.kv_groups] == [None, 21]
    tokens: list[int] = []
    params = SamplingParams(max_tokens=NEW_TOKENS)
    engine.add_request(EngineRequest(sequence_id=0, prompt_token_ids=PROMPTS[-1], params=params))
    full, windowed = engine._scheduler.kv_cache.groups
    most = [0, 0]
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
        used = [group.pool.num_blocks - group.pool.num_free for group in (full, windowed)]
        most = [max(pair) for pair in zip(most, used, strict=True)]
    assert tokens == expected[-1]
    # The last step ends with no blocks held, and no step computes the last token.
    assert most[0] == -(-(len(PROMPTS[-1]) + NEW_TOKENS - 2) // 16)
    assert most[1] <= -(-(21 + 17) // 16) + 1


@pytest.mark.parametrize("num_shared", [16, 32, 48, 80])
def test_prefix_hits_on_both_sides_of_the_windows_edge(gemma: tuple[Path, Tokens], num_shared: int) -> None:
    """The first blocks of a text are read again after they have left the window."""
    directory, expected = gemma
    engine, _ = engine_parts(directory, budget=64)
    assert run(engine, num_at_once=1) == expected
    text = [*PROMPTS[-1][:num_shared], 1, 2, 3]
    alone, _ = engine_parts(directory, is_cached=False)
    results = []
    for each in (engine, alone):
        num_hits = each.stats().total_hit_tokens
        params = SamplingParams(max_tokens=6)
        each.add_request(EngineRequest(sequence_id=99, prompt_token_ids=text, params=params))
        tokens: list[int] = []
        while each.has_work:
            tokens += [token_id for output in each.step() for token_id in output.token_ids]
        results.append((tokens, each.stats().total_hit_tokens - num_hits))
    assert results[0] == (results[1][0], num_shared)
    assert results[1][1] == 0


def test_siblings_share_a_window(gemma: tuple[Path, Tokens]) -> None:
    directory, expected = gemma
    engine, _ = engine_parts(directory, num_blocks=20, budget=64, is_cached=False)
    params = SamplingParams(max_tokens=NEW_TOKENS)
    request = EngineRequest(
        sequence_id=0, prompt_token_ids=PROMPTS[-1], params=params, sibling_ids=(1, 2, 3), cache_salt="a"
    )
    engine.add_request(request)
    tokens: Tokens = [[] for _ in range(4)]
    while engine.has_work:
        for output in engine.step():
            tokens[output.sequence_id] += output.token_ids
    assert tokens == [expected[-1]] * 4
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("num_blocks", [128, 24])
def test_beams_and_scores_are_those_of_transformers(gemma: tuple[Path, Tokens], num_blocks: int) -> None:
    """Beams fork and change places on both sides of the window's edge, also with preemptions."""
    width, num_tokens = 3, 12
    directory, _ = gemma
    engine, _ = engine_parts(directory, num_blocks=num_blocks, budget=64)
    for number, prompt in enumerate(PROMPTS):
        first = 10 * number
        engine.add_request(
            EngineRequest(
                sequence_id=first,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=num_tokens),
                sibling_ids=tuple(range(first + 1, first + width)),
                beam=BeamParams(),
            )
        )
    ended: dict[int, RequestOutput] = {}
    while engine.has_work:
        ended |= {output.sequence_id: output for output in engine.step() if output.finish_reason}
    assert (engine.stats().total_preemptions > 0) == (num_blocks == 24)
    assert engine.stats().num_used_blocks == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    for number, prompt in enumerate(PROMPTS):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        outputs = [ended[10 * number + index] for index in range(width)]
        assert [output.cum_log_prob for output in outputs] == pytest.approx(
            expected.sequences_scores.tolist(), abs=1e-3
        )
        assert [output.token_ids for output in outputs] == expected.sequences[:, len(prompt) :].tolist()


@pytest.mark.parametrize("num_blocks", [128, 14])
@pytest.mark.parametrize("draft_architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM"])
def test_a_draft_model_of_any_family_changes_no_token(
    gemma: tuple[Path, Tokens], tmp_path: Path, draft_architecture: str, num_blocks: int
) -> None:
    directory, expected = gemma
    make_tiny_model(tmp_path, draft_architecture, seed=5, num_hidden_layers=2)
    settings = {"drafter": "draft_model", "draft_model": str(tmp_path)}
    engine, _ = engine_parts(directory, num_blocks=num_blocks, budget=64, **settings)
    assert run(engine) == expected
    assert engine.stats().total_drafts > 0
    assert engine.stats().total_draft_failures == 0


@pytest.mark.parametrize(("priority", "num_hits"), [(100, 80), (0, 0)])
def test_retained_blocks_outlast_others_in_every_group(
    gemma: tuple[Path, Tokens], priority: int, num_hits: int
) -> None:
    """A hit needs the first blocks of the full group and the last window's of the windowed one."""
    directory, expected = gemma
    engine, _ = engine_parts(directory, num_blocks=14, budget=64)
    kept = PROMPTS[-1]
    retention = KVRetention(ranges=((0, len(kept), priority, float("inf")),))
    assert tokens_alone(engine, kept, retention) == expected[-1]
    for start in range(6):
        tokens_alone(engine, [(start + place) % 96 for place in range(30)])
    num_hits_before = engine.stats().total_hit_tokens
    assert tokens_alone(engine, kept) == expected[-1]
    assert engine.stats().total_hit_tokens - num_hits_before == num_hits


def tokens_alone(engine: Engine, prompt: list[int], retention: KVRetention | None = None) -> list[int]:
    params = SamplingParams(max_tokens=NEW_TOKENS)
    engine.add_request(
        EngineRequest(sequence_id=99, prompt_token_ids=prompt, params=params, retention=retention)
    )
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token_id for output in engine.step() for token_id in output.token_ids]
    return tokens
