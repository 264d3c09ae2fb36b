from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from helpers.grammars import EOS_IDS, FIXED, PERSON, SPECS, VOCAB_SIZE, regex, tiny_grammars
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.errors import InvalidRequestError, NoTokenPossibleError
from naiad.grammar import Grammars
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler import Sampler
from naiad.sequence import GrammarSpec, SamplingParams
from naiad_kernels.apply_bitmask import apply_bitmask
from naiad_kernels.best_tokens import BestTokens, best_tokens
from naiad_kernels.draw_tokens import Draws, draw_tokens

PROMPT = [50, 51, 52]
# A letter that ends some texts.
STOP_ID = 70


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return tiny_grammars(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer()))


@pytest.fixture(scope="module")
def sampler(grammars: Grammars) -> Sampler:
    return Sampler(VOCAB_SIZE, grammars=grammars)


def new_row(sampler: Sampler, sequence_id: int, spec: GrammarSpec | None, **params: object) -> RowState:
    given = {"max_tokens": 50, "stop_token_ids": EOS_IDS, **params}
    row = sampler.new_row(sequence_id, SamplingParams(grammar=spec, **given), len(PROMPT))  # type: ignore[arg-type]
    row.advance(PROMPT)
    return row


def possible(sampler: Sampler, row: RowState) -> set[int]:
    """The ids that the row may get, found by asking for each."""
    found = set()
    for token_id in range(VOCAB_SIZE):
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, token_id] = 5.0
        output = sampler.sample(logits, [row])
        assert not output.errors
        if output.sampled_token_ids[row.sequence_id] == token_id:
            found.add(token_id)
    return found


def ids(grammars: Grammars, text: str) -> list[int]:
    return list(grammars.tokenizer.tokenize_str(text))


def tokens(grammars: Grammars, *texts: str) -> set[int]:
    """The tokens that are one of these texts."""
    tokenizer = grammars.tokenizer
    return {each for each in range(VOCAB_SIZE) if each > 4 and tokenizer.decode_str([each]) in texts}


def test_only_what_the_grammar_allows_is_sampled(sampler: Sampler, grammars: Grammars) -> None:
    row = new_row(sampler, 1, regex("[ab]c?"))
    assert possible(sampler, row) == tokens(grammars, "a", "b", "ac", "bc")
    row.advance(ids(grammars, "a"))
    assert possible(sampler, row) == {*ids(grammars, "c"), *EOS_IDS}
    row.advance(ids(grammars, "c"))
    assert possible(sampler, row) == set(EOS_IDS)


def test_ids_beyond_the_tokenizer_are_never_sampled(sampler: Sampler, grammars: Grammars) -> None:
    allowed = possible(sampler, new_row(sampler, 1, regex("(?s:.*)")))
    assert max(allowed) < VOCAB_SIZE - 50
    assert len(allowed) > 200


def test_rows_without_a_grammar_are_sampled_as_ever(sampler: Sampler, grammars: Grammars) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    free, masked = new_row(sampler, 1, None), new_row(sampler, 2, PERSON)
    output = sampler.sample(logits.clone(), [free, masked, new_row(sampler, 3, None)])
    best = logits.argmax(1).tolist()
    assert (output.sampled_token_ids[1], output.sampled_token_ids[3]) == (best[0], best[2])
    assert output.sampled_token_ids[2] in {*ids(grammars, "{"), *ids(grammars, '{"')}


def test_views_of_drafts_and_clones_move_on_their_own(sampler: Sampler, grammars: Grammars) -> None:
    row = new_row(sampler, 1, regex("abc|xyz"))
    a, b, x = (ids(grammars, each)[0] for each in "abx")
    view, further = row.at(-1, [a]), row.at(-2, [a, b])
    clone = row.clone(2)
    clone.advance([x])
    assert possible(sampler, row) == tokens(grammars, "a", "ab", "abc", "x", "xy", "xyz")
    assert possible(sampler, view) == tokens(grammars, "b", "bc")
    assert possible(sampler, further) == set(ids(grammars, "c"))
    assert possible(sampler, clone) == tokens(grammars, "y", "yz")


def test_a_view_after_a_wrong_draft_fails_alone(sampler: Sampler, grammars: Grammars) -> None:
    row = new_row(sampler, 1, regex("abc|xyz"))
    output = sampler.sample(torch.zeros(2, VOCAB_SIZE), [row, row.at(-1, ids(grammars, "q"))])
    assert output.sampled_token_ids.keys() == {1}
    assert isinstance(output.errors[-1], InvalidRequestError)


@pytest.mark.parametrize("unknown", [-1, -(10**6), VOCAB_SIZE, 10**6])
def test_a_stop_id_that_the_model_lacks_holds_nothing_back(
    sampler: Sampler, grammars: Grammars, unknown: int
) -> None:
    row = new_row(sampler, 1, regex("a{1,2}"), min_tokens=2, stop_token_ids=(*EOS_IDS, unknown))
    assert possible(sampler, row) == tokens(grammars, "a", "aa")


@pytest.mark.parametrize("min_tokens", [0, 2])
def test_an_end_is_held_back_while_anything_else_is_possible(
    sampler: Sampler, grammars: Grammars, min_tokens: int
) -> None:
    row = new_row(sampler, 1, regex("a{0,2}"), min_tokens=min_tokens)
    ignoring = new_row(sampler, 2, regex("a{0,2}"), stop_token_ids=(), min_tokens=min_tokens)
    letters = tokens(grammars, "a", "aa")
    assert possible(sampler, row) == (letters if min_tokens else letters | set(EOS_IDS))
    assert possible(sampler, ignoring) == letters
    for each in (row, ignoring):
        each.advance(ids(grammars, "a") * 2)
        assert possible(sampler, each) == set(EOS_IDS)


def test_log_probs_are_those_without_the_grammar(sampler: Sampler) -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    row = new_row(sampler, 1, FIXED, num_log_probs=2)
    output = sampler.sample(logits.clone(), [row])
    (details,) = output.log_probs.values()
    expected = logits.log_softmax(1)[0]
    assert details.log_prob == pytest.approx(float(expected[output.sampled_token_ids[1]]), abs=1e-5)
    assert details.top_token_ids == expected.topk(2).indices.tolist()


def test_an_empty_intersection_is_an_error_of_the_row(sampler: Sampler, grammars: Grammars) -> None:
    excluded = new_row(sampler, 1, FIXED, bad_words=tuple((each,) for each in range(VOCAB_SIZE)))
    output = sampler.sample(torch.zeros(2, VOCAB_SIZE), [excluded, new_row(sampler, 2, FIXED)])
    assert isinstance(output.errors[1], NoTokenPossibleError)
    assert output.sampled_token_ids.keys() == {2}


def test_a_sampler_without_grammars_fails_the_row() -> None:
    sampler = Sampler(VOCAB_SIZE)
    output = sampler.sample(
        torch.zeros(2, VOCAB_SIZE), [new_row(sampler, 1, FIXED), new_row(sampler, 2, None)]
    )
    assert "has no tokenizer" in str(output.errors[1])
    assert output.sampled_token_ids.keys() == {2}


def test_a_row_with_a_grammar_needs_its_tokens_on_the_host(sampler: Sampler) -> None:
    assert sampler.reads_tokens(SamplingParams(max_tokens=1, grammar=FIXED))
    assert not sampler.reads_tokens(SamplingParams(max_tokens=1))


def test_the_bitmask_of_a_batch_allows_free_rows_everything(sampler: Sampler, grammars: Grammars) -> None:
    rows = [new_row(sampler, 1, None), new_row(sampler, 2, regex("[ab]c?")), new_row(sampler, 3, None)]
    mask = sampler._grammar_mask
    allowed = mask.allowed(rows)
    assert allowed is not None
    bits = torch.from_numpy(np.unpackbits(allowed.numpy().view(np.uint8), axis=1, bitorder="little"))
    assert bits[[0, 2]].all()
    masked = set(bits[1].nonzero().flatten().tolist())
    assert masked == tokens(grammars, "a", "b", "ac", "bc")
    assert sampler.takes_best(rows)
    assert mask.allowed([rows[0], rows[2]]) is None


def test_a_bitmask_has_nothing_of_an_earlier_one(sampler: Sampler, grammars: Grammars) -> None:
    rows = [new_row(sampler, place, regex("(?s:.*)" if place % 2 else "a")) for place in range(6)]
    broken = new_row(sampler, 9, regex("abc"))
    broken.advance(ids(grammars, "q"))
    mask = sampler._grammar_mask
    alone = mask.allowed([rows[0]])
    assert alone is not None
    expected = alone.clone()
    mask.allowed(rows)
    again = mask.allowed([broken, rows[0], new_row(sampler, 10, None)])
    assert again is not None
    assert not again[0].any()
    assert torch.equal(again[1:2], expected)
    assert (again[2] == -1).all()


def pick(logits: torch.Tensor, draws: Draws | None, allowed: torch.Tensor | None) -> BestTokens:
    """What a native kernel does, as plain torch."""
    best = best_tokens(logits, allowed)
    if draws is not None:
        draw_tokens(logits, best, draws, allowed)
    return best


def leaning_logits(sampler: Sampler, rows: list[RowState], generator: torch.Generator) -> torch.Tensor:
    """Random logits, in most rows greater where the grammar allows the token; one that it excludes is NaN.

    In some rows an end is the best token, allowed or not.
    """
    mask = sampler._grammar_mask.allowed(rows)
    assert mask is not None
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator)
    only_allowed = logits.clone()
    apply_bitmask(only_allowed, range(len(rows)), mask)
    leans = torch.rand(len(rows), 1, generator=generator) < 0.8
    excluded = (only_allowed == -torch.inf).nonzero()
    logits += torch.where(leans & only_allowed.isfinite(), 5.0, 0.0)
    logits[:, [*EOS_IDS, STOP_ID]] += torch.where(
        torch.rand(len(rows), 1, generator=generator) < 0.2, 20.0, 0.0
    )
    row, token_id = excluded[int(torch.randint(len(excluded), (1,), generator=generator))].tolist()
    logits[row, token_id] = torch.nan
    return logits


@pytest.mark.parametrize("min_tokens", [0, 4])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.9}], ids=str
)
def test_what_is_picked_is_what_is_sampled(
    sampler: Sampler,
    grammars: Grammars,
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
    min_tokens: int,
) -> None:
    """Also where a row cannot go on: its grammar is named, and its neighbours notice nothing."""
    monkeypatch.setattr(sampler, "_pick", pick)
    again: list[int] = []
    pick_again = Sampler._pick_again
    monkeypatch.setattr(Sampler, "_pick_again", lambda *args: again.extend(args[-1]) or pick_again(*args))
    generator = torch.Generator().manual_seed(3)
    rows = [new_row(sampler, 0, None, seed=9, **params)]
    more: list[dict[str, Any]] = [{}, {"stop_token_ids": ()}, {"stop_token_ids": (STOP_ID, *EOS_IDS)}]
    for spec in (*SPECS, *SPECS, *[regex("(?s:.*)")] * 3):
        own = more[len(rows) % 3]
        rows.append(new_row(sampler, len(rows), spec, seed=len(rows), min_tokens=min_tokens, **params, **own))
    broken = new_row(sampler, 99, regex("abc"), **params)
    broken.advance(ids(grammars, "q"))
    num_picked = num_ends = 0
    while len(rows) > 3:
        views = [*rows, broken, rows[1].at(-1, ids(grammars, "q")), rows[2].clone(98)]
        logits = leaning_logits(sampler, views, generator)
        expected = sampler.sample(logits.clone(), views)
        compute = partial(with_picks, logits)
        output = sampler.finish(sampler.pick(views, compute))
        assert output.sampled_token_ids == expected.sampled_token_ids
        assert {each: str(error) for each, error in output.errors.items()} == {
            each: str(error) for each, error in expected.errors.items()
        }
        assert "cannot follow the grammar" in str(output.errors[99])
        num_picked += len(views)
        for row in rows:
            row.advance([output.sampled_token_ids[row.sequence_id]])
            if output.sampled_token_ids[row.sequence_id] in {*EOS_IDS, STOP_ID}:
                num_ends += 1
        rows = [row for row in rows if output.sampled_token_ids[row.sequence_id] not in {*EOS_IDS, STOP_ID}]
    assert num_ends > 10
    # Filters need every mask before.
    assert len(again) == 0 if "top_p" in params else 20 < len(again) < num_picked - 50, (
        len(again),
        num_picked,
    )


def with_picks(
    logits: torch.Tensor, draws: Draws | None, allowed: torch.Tensor | None
) -> tuple[torch.Tensor, BestTokens]:
    return logits, pick(logits, draws, allowed)


def test_rows_with_a_grammar_that_ask_for_more_are_picked_later(sampler: Sampler) -> None:
    for more in ({"num_log_probs": 0}, {"repetition_penalty": 1.2}, {"logit_bias": ((1, 2.0),)}):
        assert not sampler.takes_best([new_row(sampler, 1, PERSON, **more)])
