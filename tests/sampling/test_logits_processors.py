from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from helpers.sampling_rows import TextRow, make_row
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, apply_processors
from naiad.sampling.param_tensors import ById

VOCAB_SIZE = 30
PROMPT, OUTPUT = [1, 2, 2, 9], [3, 1, 5, 6]
STOP_IDS = (4, 17)


def random_logits(num_rows: int) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3


def apply(logits: Tensor, rows: list[TextRow]) -> Tensor:
    changed = logits.clone()
    apply_processors(LOGITS_PROCESSORS, changed, rows)
    return changed


def theirs(row: TextRow, logits: Tensor) -> Tensor:
    """[vocab_size] logits after transformers' processors, in the order of its `generate`."""
    params = row.params
    processors: list[Any] = []
    if params.logit_bias:
        biases = {(token_id,): value for token_id, value in params.logit_bias}
        processors.append(transformers.SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        processors.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        length = row.num_prompt_tokens
        processors.append(
            transformers.MinNewTokensLengthLogitsProcessor(length, params.min_tokens, list(STOP_IDS))
        )
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        processors.append(transformers.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    ids = torch.tensor([row.token_ids])
    return transformers.LogitsProcessorList(processors)(ids, logits[None].clone())[0]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"logit_bias": ((3, 2.5), (29, -7.0), (0, 100.0))},
    {"bad_words": ((7,), (29,))},
    # The known tokens end with the first ids of the first two words; the third word starts in the prompt.
    {"bad_words": ((6, 7), (5, 6, 8), (9, 3, 1, 5, 6, 11), (5, 12), (2,), (6, 5, 13))},
    # Longer than the known tokens.
    {"bad_words": ((0,) * 20, (*range(9), 1, 2, 2, 9, 3, 1, 5, 6, 14))},
    {"min_tokens": 5, "stop_token_ids": STOP_IDS},
    {"min_tokens": 4, "stop_token_ids": STOP_IDS},
    {"allowed_token_ids": (0, 5, 6, 29)},
    {"logit_bias": ((3, 2.5), (1, -3.0)), "repetition_penalty": 1.5},
    {
        "logit_bias": ((3, 2.5), (7, 50.0), (17, 9.0)),
        "repetition_penalty": 1.1,
        "bad_words": ((7,), (6, 5)),
        "min_tokens": 9,
        "stop_token_ids": STOP_IDS,
        "allowed_token_ids": (1, 3, 5, 7, 17, 20),
    },
]


@pytest.mark.parametrize("params", SETTINGS, ids=lambda params: "+".join(params) or "none")
def test_processed_logits_equal_those_of_transformers(params: dict[str, Any]) -> None:
    (logits,) = random_logits(1)
    row = make_row(prompt=PROMPT, output=OUTPUT, **params)
    assert torch.equal(apply(logits[None], [row])[0], theirs(row, logits))


def test_a_mixed_batch_equals_transformers_row_by_row() -> None:
    rows = []
    for index in range(3 * len(SETTINGS)):
        output = [[], OUTPUT, [5, 6], [9, 9, 29]][index % 4]
        rows.append(make_row(index, prompt=PROMPT, output=output, **SETTINGS[index % len(SETTINGS)]))
    logits = random_logits(len(rows))
    expected = torch.stack([theirs(row, logits[index]) for index, row in enumerate(rows)])
    assert torch.equal(apply(logits, rows), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = random_logits(2)
    expected = logits.clone()
    expected[1, 4] -= 0.5 + 3 * 0.25
    expected[1, 6] -= 0.5 + 0.25
    rows = [
        make_row(0, output=[4, 4]),
        make_row(1, prompt=[4, 9, 9], output=[4, 6, 4, 4], presence_penalty=0.5, frequency_penalty=0.25),
    ]
    torch.testing.assert_close(apply(logits, rows), expected)


def test_repetition_comes_before_the_subtractions() -> None:
    row = make_row(output=[1], repetition_penalty=2.0, presence_penalty=0.5)
    assert apply(torch.full((1, 5), 2.0), [row])[0, 1] == 0.5


def test_before_the_first_output_token_nothing_is_counted() -> None:
    logits = random_logits(1)
    assert torch.equal(apply(logits, [make_row(prompt=[3], presence_penalty=1.0)]), logits)


def test_stop_ids_outside_the_vocabulary_mask_nothing() -> None:
    logits = random_logits(1)
    assert torch.equal(apply(logits, [make_row(min_tokens=2, stop_token_ids=(VOCAB_SIZE, -1))]), logits)


def test_a_bias_does_not_lift_a_mask() -> None:
    row = make_row(
        output=[1, 2, 3],
        logit_bias=((1, 1e30), (2, 1e30), (3, 1e30)),
        bad_words=((1,),),
        allowed_token_ids=(1, 3, 4),
        presence_penalty=-100.0,
        min_tokens=9,
        stop_token_ids=(3,),
    )
    changed = apply(random_logits(1), [row])[0]
    assert changed.isfinite().nonzero().flatten().tolist() == [4]


def test_lists_that_are_equal_but_not_the_same_object_are_told_apart() -> None:
    logits = torch.zeros(40, VOCAB_SIZE)
    for start in range(0, 200, 40):
        biases = [tuple((n, float(start + index)) for n in (1, 2)) for index in range(40)]
        changed = apply(logits, [make_row(n, logit_bias=bias) for n, bias in enumerate(biases)])
        assert changed[:, 2].tolist() == [float(start + index) for index in range(40)]


def test_a_key_is_equal_to_keys_of_its_object_only() -> None:
    one, other = [1, 2], [1, 2]
    assert ById(one) == ById(one)
    assert ById(one) != ById(other)


class Recorder:
    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.seen: list[list[int]] = []

    def applies_to(self, params: Any) -> bool:
        return bool(self.wrapped.applies_to(params))

    def apply(self, logits: Tensor, rows: dict[int, TextRow]) -> None:
        self.seen.append(sorted(rows))
        self.wrapped.apply(logits, rows)


def test_processors_see_only_the_rows_that_ask_for_them() -> None:
    recorders = [Recorder(processor) for processor in LOGITS_PROCESSORS]
    features: list[dict[str, Any]] = [
        {"logit_bias": ((1, 1.0),)},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.1},
        {"bad_words": ((1,),)},
        {"min_tokens": 5, "stop_token_ids": (1,)},
        {"allowed_token_ids": (1,)},
        {"top_n_sigma": 1.0},
    ]
    rows = [make_row(0), *(make_row(n, **params) for n, params in enumerate(features, start=1)), make_row(8)]
    apply_processors(recorders, random_logits(len(rows)), rows)
    assert [recorder.seen for recorder in recorders] == [[[n]] for n in range(1, 8)]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "stop_token_ids": (3,)}]
)
def test_rows_without_a_feature_meet_no_processor(params: dict[str, Any]) -> None:
    recorders = [Recorder(processor) for processor in LOGITS_PROCESSORS]
    apply_processors(recorders, random_logits(2), [make_row(n, **params) for n in range(2)])
    assert all(not recorder.seen for recorder in recorders)
