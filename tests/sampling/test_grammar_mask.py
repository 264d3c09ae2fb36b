from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.grammars import EOS_IDS, FIXED, PERSON, VOCAB_SIZE, regex, tiny_grammars
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.errors import InvalidRequestError, NoTokenPossibleError
from naiad.grammar import Grammars
from naiad.sampling.row_state import RowState
from naiad.sampling.sampler import Picked, Sampler
from naiad.sequence import GrammarSpec, SamplingParams
from naiad_kernels.best_tokens import best_tokens
from naiad_kernels.draw_tokens import draw_tokens

PROMPT = [50, 51, 52]


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
    allowed = sampler.allowed(rows)
    assert allowed is not None
    bits = torch.from_numpy(np.unpackbits(allowed.numpy().view(np.uint8), axis=1, bitorder="little"))
    assert bits[[0, 2]].all()
    masked = set(bits[1].nonzero().flatten().tolist())
    assert masked == tokens(grammars, "a", "b", "ac", "bc")
    assert sampler.takes_best(rows)
    assert sampler.allowed([rows[0], rows[2]]) is None


def test_a_bitmask_has_nothing_of_an_earlier_one(sampler: Sampler, grammars: Grammars) -> None:
    rows = [new_row(sampler, place, regex("(?s:.*)" if place % 2 else "a")) for place in range(6)]
    broken = new_row(sampler, 9, regex("abc"))
    broken.advance(ids(grammars, "q"))
    alone = sampler.allowed([rows[0]])
    assert alone is not None
    expected = alone.clone()
    sampler.allowed(rows)
    again = sampler.allowed([broken, rows[0], new_row(sampler, 10, None)])
    assert again is not None
    assert not again[0].any()
    assert torch.equal(again[1:2], expected)
    assert (again[2] == -1).all()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}])
def test_what_is_picked_with_the_bitmask_is_what_is_sampled(
    sampler: Sampler, grammars: Grammars, params: dict[str, float]
) -> None:
    """Also where a row cannot go on: its grammar is named, and its neighbours notice nothing."""
    rows = [new_row(sampler, 1, PERSON, **params), new_row(sampler, 2, None, **params)]
    rows += [new_row(sampler, 3, regex("abc"), **params), new_row(sampler, 4, regex("abc"), **params)]
    rows[3].advance(ids(grammars, "q"))
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    alone = sampler.sample(logits.clone(), rows)
    allowed, draws = sampler.allowed(rows), sampler.draws(rows)
    best = best_tokens(logits, allowed)
    if draws is not None:
        draw_tokens(logits, best, draws, allowed)
    before = logits.clone()
    output = sampler.finish(sampler.start(logits, rows, Picked(best, draws)))
    assert output.sampled_token_ids == alone.sampled_token_ids
    assert output.sampled_token_ids.keys() == {1, 2, 3}
    assert str(output.errors[4]) == str(alone.errors[4])
    assert "cannot follow the grammar" in str(output.errors[4])
    assert torch.equal(logits, before)


def test_rows_with_a_grammar_that_ask_for_more_are_picked_later(sampler: Sampler) -> None:
    for more in ({"num_log_probs": 0}, {"repetition_penalty": 1.2}, {"logit_bias": ((1, 2.0),)}):
        assert not sampler.takes_best([new_row(sampler, 1, PERSON, **more)])
