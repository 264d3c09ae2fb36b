from __future__ import annotations

import pytest
import torch
from kernel_interpreter import Interpret
from rejection_cases import ragged_case, tokens_without_drafts

from naiad_kernels.rejection_sampling import Drafts, TargetRows, kernel, reference, rejection_sampling

Arguments = tuple[TargetRows, Drafts, torch.Tensor, int]
RAGGED = [[0], [3], [2, 0, 1], [-1, 4, -1, 0, -1], [1, 16, 5, 2]]


def assert_equal_outputs(interpret: Interpret, given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    num_accepted, token_ids = interpret(kernel.rejection_sampling, *given)
    for expected in (reference.rejection_sampling(*given), rejection_sampling(*given)):
        assert torch.equal(num_accepted, expected[0])
        assert torch.equal(token_ids, expected[1])
    return num_accepted, token_ids


@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize("vocab_size", [9, 1025])
@pytest.mark.parametrize("num_drafts", RAGGED, ids=str)
def test_tokens_equal_the_reference(
    interpret: Interpret, num_drafts: list[int], vocab_size: int, has_probs: bool
) -> None:
    given = ragged_case(num_drafts, vocab_size, has_probs)
    num_accepted, token_ids = assert_equal_outputs(interpret, given)
    assert (num_accepted <= torch.tensor(num_drafts).clamp(min=0)).all()
    emitted = (num_accepted + 1).where(torch.tensor(num_drafts) >= 0, 0)
    slots = torch.arange(given[-1] + 1)
    assert torch.equal(token_ids >= 0, slots < emitted[:, None])


@pytest.mark.parametrize("num_drafts", range(1, 17))
def test_every_number_of_drafts(interpret: Interpret, num_drafts: int) -> None:
    target, drafts, starts, _ = ragged_case([num_drafts] * 2, 17, True)
    assert drafts.probs is not None
    drafts.probs[:num_drafts] = 1e-9
    drafts.token_ids[:num_drafts] = tokens_without_drafts(target)[:num_drafts]
    num_accepted, _ = assert_equal_outputs(interpret, (target, drafts, starts, num_drafts))
    assert num_accepted[0] == num_drafts


@pytest.mark.parametrize("has_probs", [True, False])
def test_no_sequences(interpret: Interpret, has_probs: bool) -> None:
    _, token_ids = assert_equal_outputs(interpret, ragged_case([], 9, has_probs))
    assert token_ids.shape == (0, 1)


def test_batch_mates_and_rows_after_the_last_do_not_show(interpret: Interpret) -> None:
    target, drafts, starts, max_drafts = ragged_case([2, 5, 1], 40, True)
    together = interpret(kernel.rejection_sampling, target, drafts, starts, max_drafts)
    alone = interpret(kernel.rejection_sampling, target, drafts, starts[1:3].clone(), max_drafts)
    for all_of_them, one in zip(together, alone, strict=True):
        assert torch.equal(all_of_them[1:2], one)


def test_a_law_that_is_the_targets_is_always_accepted(interpret: Interpret) -> None:
    target, drafts, starts, max_drafts = ragged_case([6] * 10, 50, True)
    target.temperature.fill_(0.8)
    target.threshold.fill_(-3.0)
    scaled = (target.logits.double() - target.best[:, None]) / 0.8
    law = scaled.masked_fill(scaled < -3.0, -torch.inf).softmax(1).float()
    is_draft = drafts.token_ids >= 0
    drafts.token_ids[is_draft] = law.multinomial(1)[:, 0][is_draft]
    given = (target, Drafts(drafts.token_ids, law), starts, max_drafts)
    num_accepted, _ = assert_equal_outputs(interpret, given)
    assert num_accepted.tolist() == [6] * 10


def test_rounding_that_leaves_nothing_to_recover_recovers_a_possible_token(interpret: Interpret) -> None:
    """A draft whose law exceeds the target's everywhere, as it may in the last digit."""
    target, drafts, starts, max_drafts = ragged_case([1] * 20, 30, True)
    target.temperature.fill_(1.0)
    probs = torch.full_like(target.logits, 2.0)
    impossible = target.logits.isneginf().int().argmax(1)
    token_ids = torch.where(drafts.token_ids >= 0, impossible, -1)
    given = (target, Drafts(token_ids, probs), starts, max_drafts)
    num_accepted, emitted = assert_equal_outputs(interpret, given)
    assert num_accepted.count_nonzero() == 0
    assert torch.equal(emitted[:, 0], tokens_without_drafts(target)[starts[:-1].long()])


def test_what_the_target_can_not_emit_is_never_accepted(interpret: Interpret) -> None:
    target, drafts, starts, max_drafts = ragged_case([3] * 8, 30, True)
    scaled = (target.logits.double() - target.best[:, None]) / target.temperature.clamp(min=0.1)[:, None]
    is_possible = scaled >= target.threshold.clamp(min=-1e300)[:, None]
    drafts.token_ids[drafts.token_ids >= 0] = is_possible.int().argmin(1)[drafts.token_ids >= 0]
    probs = torch.zeros_like(target.logits)
    for given in (drafts, Drafts(drafts.token_ids, probs)):
        num_accepted, emitted = assert_equal_outputs(interpret, (target, given, starts, max_drafts))
        assert num_accepted.count_nonzero() == 0
        assert is_possible[starts[:-1].long()].gather(1, emitted[:, :1]).all()


@pytest.mark.parametrize("has_probs", [True, False])
def test_greedy_rows_emit_the_best_tokens(interpret: Interpret, has_probs: bool) -> None:
    target, drafts, starts, max_drafts = ragged_case([0, 4, 2, 8], 60, has_probs)
    target.temperature.zero_()
    # Of equal tokens the lowest id is taken.
    target.logits[:, [41, 17]] = target.best[:, None] + 1
    drafts.token_ids[starts[1] : starts[1] + 4] = 17
    drafts.token_ids[starts[2] : starts[2] + 2] = 41
    given = (target, drafts, starts, max_drafts)
    num_accepted, emitted = assert_equal_outputs(interpret, given)
    assert num_accepted[:3].tolist() == [0, 4, 0]
    assert (emitted[emitted >= 0] == 17).all()
