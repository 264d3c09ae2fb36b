from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.sampling_rows import TextRow, make_row
from naiad.outputs import ModelOutput, TokenLogProbs
from naiad.sampling.sampler import Sampler
from naiad.sampling.sampler_output import RawLogits, best_token_ids

VOCAB_SIZE = 700


def random_logits(num_rows: int) -> Tensor:
    """Random logits with ties, as from low precision, and zeros of both signs."""
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    return (logits * 4).round() / 4


def sample(logits: Tensor, rows: list[TextRow]) -> ModelOutput:
    return Sampler(logits.shape[1]).sample(logits.clone(), rows)


def in_order(row: Tensor) -> list[int]:
    """All ids, best first; among ties the lower id comes first."""
    return sorted(range(len(row)), key=lambda token_id: (-float(row[token_id]), token_id))


def test_log_probs_are_those_of_the_models_own_logits() -> None:
    logits = random_logits(4)
    changes = {
        "temperature": 0.3,
        "top_k": 2,
        "repetition_penalty": 2.0,
        "logit_bias": ((11, 50.0),),
        "bad_words": ((5,),),
    }
    rows = [make_row(n, prompt=[11, 4], output=[7], num_log_probs=5, **changes) for n in range(4)]
    output = sample(logits, rows)
    expected = logits.double().log_softmax(1)
    for n in range(4):
        found = output.log_probs[n]
        assert output.sampled_token_ids[n] == 11
        assert found.log_prob == pytest.approx(float(expected[n, 11]), abs=1e-5)
        assert found.top_token_ids == in_order(logits[n])[:5]
        assert found.rank == 1 + sum(float(each) > float(logits[n, 11]) for each in logits[n])
        assert found.top_log_probs == pytest.approx(expected[n, found.top_token_ids].tolist(), abs=1e-5)


def test_generation_logits_are_the_models_own() -> None:
    logits = random_logits(3)
    params = {"repetition_penalty": 2.0, "allowed_token_ids": (3, 4), "returns_generation_logits": True}
    output = sample(logits, [make_row(0, **params), make_row(1), make_row(2, **params)])
    assert output.generation_logits == {n: logits[n].numpy().astype("<f4").tobytes() for n in (0, 2)}
    assert not output.log_probs


def test_only_rows_that_ask_get_log_probs() -> None:
    output = sample(random_logits(3), [make_row(0), make_row(1, num_log_probs=0), make_row(2)])
    assert list(output.log_probs) == [1]
    assert output.log_probs[1].top_token_ids == []
    assert output.log_probs[1].top_log_probs == []
    assert output.generation_logits == {}


def test_nothing_is_copied_when_no_row_asks() -> None:
    assert RawLogits.of(random_logits(3), [make_row(n, temperature=1.0) for n in range(3)]) is None


def test_log_probs_do_not_depend_on_batch_mates() -> None:
    logits = random_logits(60)
    rows = [
        make_row(n, seed=n, temperature=n % 3, num_log_probs=n % 21 - 1, returns_generation_logits=n % 4 == 0)
        for n in range(60)
    ]
    together = sample(logits, rows)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3)).tolist()
    assert sample(logits[order], [rows[n] for n in order]) == together
    found: dict[int, TokenLogProbs] = {}
    for n in range(60):
        found |= sample(logits[n : n + 1], [rows[n]]).log_probs
    assert found == together.log_probs


@pytest.mark.parametrize("num", [1, 2, 5, 20])
def test_equal_logits_are_listed_by_id(num: int) -> None:
    logits = random_logits(50)
    logits[40:] = (logits[40:] > 2).float()
    logits[45:] = 0.0
    logits[48, ::2] = -0.0
    assert best_token_ids(logits, num).tolist() == [in_order(row)[:num] for row in logits]


def test_more_alternatives_than_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    output = Sampler(3).sample(logits, [make_row(num_log_probs=20)])
    assert output.log_probs[0].top_token_ids == [1, 2, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_that_a_mask_hides_fails_the_row_that_asks_for_log_probs(bad: float) -> None:
    logits = torch.zeros(2, 9)
    logits[0, 4] = bad
    rows = [make_row(n, bad_words=((4,),), num_log_probs=1, returns_generation_logits=True) for n in range(2)]
    output = sample(logits, rows)
    assert str(output.errors[0]) == "the model's output for this request is not finite"
    assert list(output.sampled_token_ids) == list(output.log_probs) == list(output.generation_logits) == [1]
