"""The rules of beam search, with a model that depends only on the text's last token and length."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from helpers.sampling_rows import make_row
from helpers.tiny_models import make_tiny_model
from naiad.sampling.beam_search import Beam, BeamRules, BeamSearch
from naiad.sampling.sampler import Sampler


def make_table(seed: int, vocab_size: int = 12) -> list[list[float]]:
    """The log-probabilities of the next token, indexed by the last one."""
    draw = random.Random(seed)
    rows = [[draw.gauss(0, 2) for _ in range(vocab_size)] for _ in range(vocab_size + 1)]
    return [[value - math.log(sum(map(math.exp, row))) for value in row] for row in rows]


def search(table: list[list[float]], rules: BeamRules) -> list[Beam]:
    beams = BeamSearch(rules)
    while True:
        candidates = []
        for beam in beams.running:
            row = table[beam.token_ids[-1] if beam.token_ids else -1]
            best = sorted(range(len(row)), key=lambda token_id: -row[token_id])[: rules.num_candidates]
            candidates.append([(token_id, row[token_id]) for token_id in best])
        if beams.advance(candidates) is None:
            return beams.best()


def all_texts(table: list[list[float]], rules: BeamRules) -> list[Beam]:
    """Every text that ends, by brute force."""
    open_beams, ended = [Beam()], []
    while open_beams:
        beam = open_beams.pop()
        for token_id, log_prob in enumerate(table[beam.token_ids[-1] if beam.token_ids else -1]):
            longer = beam.longer((token_id, log_prob))
            is_stopped = token_id in rules.stop_token_ids
            if is_stopped or len(longer.token_ids) == rules.max_tokens:
                score = longer.sum_log_probs / len(longer.token_ids) ** rules.length_penalty
                ended.append(replace(longer, score=score, is_stopped=is_stopped))
            else:
                open_beams.append(longer)
    return sorted(ended, key=lambda beam: -beam.score)


def test_a_beam_as_wide_as_the_tree_finds_the_best_texts() -> None:
    rules = BeamRules(width=64, max_tokens=3, stop_token_ids=(), length_penalty=1.0)
    table = make_table(1, vocab_size=4)
    assert [b.token_ids for b in search(table, rules)] == [b.token_ids for b in all_texts(table, rules)]


def test_scores_are_sums_over_powers_of_the_length() -> None:
    rules = BeamRules(width=3, max_tokens=6, stop_token_ids=(2,), length_penalty=0.7)
    for beam in search(make_table(2), rules):
        assert beam.score == pytest.approx(sum(beam.log_probs) / len(beam.token_ids) ** 0.7)
        assert beam.is_stopped == (beam.token_ids[-1] == 2)


def test_stopping_early_ends_with_the_first_full_set() -> None:
    table = make_table(3)
    early = BeamRules(width=2, max_tokens=30, stop_token_ids=(0, 1, 2), stops_early=True)
    late = replace(early, stops_early=False)
    assert len(search(table, early)) == len(search(table, late)) == 2
    assert search(table, late)[0].score >= search(table, early)[0].score


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("stops_early", [False, True])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_and_scores_are_those_of_transformers(
    tiny_model: transformers.PreTrainedModel, width: int, stops_early: bool, length_penalty: float
) -> None:
    prompt = [5, 9, 17]
    rules = BeamRules(width, 9, (3, 40), length_penalty, stops_early)
    expected = tiny_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=rules.max_tokens,
            length_penalty=length_penalty,
            early_stopping=stops_early,
            eos_token_id=list(rules.stop_token_ids),
            pad_token_id=1,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    beams = BeamSearch(rules)
    is_over = False
    while not is_over:
        candidates = []
        for beam in beams.running:
            with torch.inference_mode():
                logits = tiny_model(torch.tensor([[*prompt, *beam.token_ids]])).logits[0, -1]
            best = logits.float().log_softmax(-1).topk(rules.num_candidates)
            candidates.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        is_over = beams.advance(candidates) is None
    made = [list(beam.token_ids) for beam in beams.best()]
    wanted = [ids[len(prompt) :] for ids in expected.sequences.tolist()]
    assert [ids + [1] * (len(wanted[0]) - len(ids)) for ids in made] == wanted
    scores = [beam.score for beam in beams.best()]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def test_beams_without_a_possible_token_end_and_the_others_go_on() -> None:
    beams = BeamSearch(BeamRules(width=3, max_tokens=3))
    assert beams.advance([[(1, -1.0), (2, -2.0)]]) == [0, 0]
    assert beams.advance([[], [(4, -1.0)]]) == [1]
    assert beams.advance([[(5, -1.0)]]) is None
    assert [beam.token_ids for beam in beams.best()] == [(2, 4, 5)]


def test_a_search_without_a_possible_token_ends_with_what_has_ended() -> None:
    beams = BeamSearch(BeamRules(width=2, max_tokens=9, stop_token_ids=(1,)))
    assert beams.advance([[(1, -1.0), (2, -2.0)]]) == [0]
    assert beams.advance([[]]) is None
    assert [beam.token_ids for beam in beams.best()] == [(1,)]


@pytest.mark.parametrize(
    ("allowed", "bad_words"),
    [
        ([3, 40, 7, 9, 21], []),
        ([3, 7, 9, 21], [[7, 9], [9, 7], [21, 21]]),
        # No token can follow 9.
        ([3, 7, 9, 21, 30], [[9, 3], [9, 7], [9, 9], [9, 21], [9, 30]]),
        ([], [[7], [9, 21]]),
    ],
)
@pytest.mark.parametrize("width", [2, 4])
def test_with_impossible_tokens_too(
    tiny_model: transformers.PreTrainedModel, width: int, allowed: list[int], bad_words: list[list[int]]
) -> None:
    vocab_size = tiny_model.config.vocab_size
    check_beams(
        tiny_model,
        BeamRules(width, 6, (3,), 1.0),
        {"allowed_token_ids": tuple(allowed), "bad_words": tuple(map(tuple, bad_words))},
        prefix_allowed_tokens_fn=lambda _batch, _ids: allowed or list(range(vocab_size)),
        bad_words_ids=bad_words or None,
    )


def test_nothing_normalises_log_probabilities_after_biases_and_penalties(
    tiny_model: transformers.PreTrainedModel,
) -> None:
    beams = check_beams(
        tiny_model,
        BeamRules(3, 6, (3,), 1.0),
        {"logit_bias": ((7, 20.0), (9, 18.0)), "repetition_penalty": 1.5},
        sequence_bias={(7,): 20.0, (9,): 18.0},
        repetition_penalty=1.5,
    )
    assert min(beams[0].log_probs) > 0


def check_beams(
    model: transformers.PreTrainedModel, rules: BeamRules, params: dict[str, Any], **options: Any
) -> list[Beam]:
    """Search with the sampler's candidates; assert that texts and scores are those of `transformers`.

    Args:
        model: computes the logits.
        rules: the rules of the search.
        params: sampling parameters of the beams.
        **options: the same for `generate`.
    """
    prompt = [5, 9, 17]
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            num_beams=rules.width,
            num_return_sequences=rules.width,
            max_new_tokens=rules.max_tokens,
            eos_token_id=list(rules.stop_token_ids),
            pad_token_id=1,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        ),
        **options,
    )
    beams, is_over = BeamSearch(rules), False
    while not is_over:
        rows = [
            make_row(index, prompt, list(beam.token_ids), num_candidates=rules.num_candidates, **params)
            for index, beam in enumerate(beams.running)
        ]
        with torch.inference_mode():
            logits = model(torch.tensor([row.token_ids for row in rows])).logits[:, -1].float()
            candidates = Sampler(model.config.vocab_size).sample(logits, rows).candidates
        is_over = beams.advance([candidates[row.sequence_id] for row in rows]) is None
    made = [list(beam.token_ids) for beam in beams.best()]
    wanted = [ids[len(prompt) :] for ids in expected.sequences.tolist()]
    assert [ids + [1] * (len(wanted[0]) - len(ids)) for ids in made] == wanted
    scores = [beam.score for beam in beams.best()]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
    return beams.best()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedModel:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_diversity_prefers_what_continues_worse_beams_and_leaves_scores_alone() -> None:
    """The first beam's children score higher, unless the diversity rate favours those of the second."""
    rows = [[(1, -0.1), (2, -0.2), (3, -0.3)], [(4, -0.1), (5, -0.2), (6, -3.0)]]
    for rate, expected in ((0.0, [0, 0]), (0.9, [0, 0]), (1.05, [1, 0]), (9.0, [1, 1])):
        beams = BeamSearch(BeamRules(width=2, max_tokens=9, length_penalty=0.0, diversity_rate=rate))
        assert beams.advance([[(7, -0.5), (8, -1.5)]]) == [0, 0]
        assert beams.advance(rows) == expected, rate
        assert [beam.sum_log_probs for beam in beams.running] == [
            pytest.approx(sum(beam.log_probs)) for beam in beams.running
        ]


def test_a_searchs_diversity_changes_its_texts() -> None:
    table = make_table(3)
    rules = BeamRules(width=4, max_tokens=6, stop_token_ids=(1,))
    plain, diverse = (search(table, replace(rules, diversity_rate=rate)) for rate in (0.0, 2.0))
    assert [beam.token_ids for beam in plain] != [beam.token_ids for beam in diverse]
    for beam in diverse:
        assert beam.score == pytest.approx(sum(beam.log_probs) / len(beam.token_ids))
