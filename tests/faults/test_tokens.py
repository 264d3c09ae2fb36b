"""A token that the model does not have never leaves the sampler."""

from __future__ import annotations

import pytest
import torch

from naiad.errors import InternalError
from naiad.sampling.sampler import Picked, Sampler
from naiad.sequence import SamplingParams
from naiad_kernels.best_tokens import BestTokens

VOCAB_SIZE = 20


@pytest.mark.parametrize("bad_id", [-1, VOCAB_SIZE, 2**31 - 1])
def test_a_token_outside_the_vocabulary_fails_its_row_alone(bad_id: int) -> None:
    """Kernels pick tokens and check drafts; whatever they return is checked once more."""
    sampler = Sampler(VOCAB_SIZE)
    rows = [sampler.new_row(each, SamplingParams(max_tokens=5), 1) for each in range(3)]
    for row in rows:
        row.advance([5])
    picked = Picked(BestTokens(torch.tensor([7, bad_id, 8]), torch.tensor([1.0, 2.0, 3.0])), None)
    output = sampler.finish(sampler.start(torch.zeros(3, VOCAB_SIZE), rows, picked))
    assert output.sampled_token_ids == {0: 7, 2: 8}
    assert output.errors.keys() == {1}
    assert isinstance(output.errors[1], InternalError)
