"""The best tokens of rows of logits, with and without a bitmask, and what the engine makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from naiad_kernels.best_tokens import BestTokens, best_tokens, num_mask_words, reference
from naiad_kernels.linear import linear
from naiad_kernels.native.library import Library, Team
from naiad_kernels.native.panels import NativeWeight
from naiad_kernels.native.recorder import TapeRecorder
from naiad_kernels.native.tape import Tape

SIZES = [1, 15, 16, 17, 100, 1003]


def found(team: Team, logits: torch.Tensor, allowed: torch.Tensor | None = None) -> BestTokens:
    """What the record finds in rows that the caller writes; they stay as they are."""
    recorder = TapeRecorder()
    rows = recorder.rows(logits.shape[1])
    best_tokens(rows)
    tape = Tape(recorder.finish(rows), team)
    best = BestTokens.empty(len(logits))
    best.token_ids.fill_(-7)
    left = tape.run(len(logits), inputs=[logits], best=best, allowed=allowed)
    assert torch.equal(left.nan_to_num(7), logits.nan_to_num(7))
    return best


def assert_as_reference(best: BestTokens, logits: torch.Tensor, allowed: torch.Tensor | None = None) -> None:
    token_ids, values = reference.best_tokens(logits, allowed)
    assert best.token_ids.tolist() == token_ids.tolist()
    assert torch.equal(best.logits.nan_to_num(7, 8, 9), values.nan_to_num(7, 8, 9))


def mask_of(is_allowed: torch.Tensor) -> torch.Tensor:
    """`[num_rows, vocab_size]` bool as a bitmask."""
    padded = torch.nn.functional.pad(is_allowed, (0, -is_allowed.shape[1] % 32))
    return torch.from_numpy(np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32))


def rows_of(vocab_size: int, num_rows: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator)


def with_ties(logits: torch.Tensor) -> torch.Tensor:
    """Few different numbers, zeros of both signs among them."""
    coarse = (logits * 1.5).round()
    coarse[-1] = torch.where(logits[-1] > 0, 0.0, -0.0)
    return coarse


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_the_lowest_id_of_the_greatest(library: Library, num_threads: int, vocab_size: int) -> None:
    team = library.new_team(num_threads)
    logits = rows_of(vocab_size)
    for each in (logits, with_ties(logits), logits - 1000, torch.full_like(logits, -3e38)):
        best = found(team, each)
        assert_as_reference(best, each)
        assert best.token_ids.tolist() == each.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_threads", [1, 4])
def test_masks(library: Library, num_threads: int, vocab_size: int) -> None:
    """Random ones, and such that forbid just the best token, all but one, and all."""
    team = library.new_team(num_threads)
    logits = with_ties(rows_of(vocab_size))
    random = rows_of(vocab_size) > 0
    others = torch.ones_like(random)
    others[torch.arange(len(logits)), logits.argmax(dim=1)] = False
    single = torch.zeros_like(random)
    single[:, -1] = True
    none = torch.zeros_like(random)
    mixed = torch.stack((random[0], others[1], single[2], none[3], ~none[4]))
    for is_allowed in (random, others, single, none, mixed):
        best = found(team, logits, mask_of(is_allowed))
        assert_as_reference(best, logits, mask_of(is_allowed))
        has_any = is_allowed.any(dim=1)
        assert (best.token_ids[~has_any] == -1).all()
        assert best.logits[~has_any].isneginf().all()
        assert is_allowed[has_any].gather(1, best.token_ids[has_any].unsqueeze(1)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_what_is_not_finite_shows_in_its_row_alone(library: Library, num_threads: int, bad: float) -> None:
    team = library.new_team(num_threads)
    for place in (0, 17, 499, 500, 1002):
        logits = rows_of(1003)
        logits[1, place] = bad
        logits[3, place] = logits[3, 800] = bad
        logits[4] = bad
        best = found(team, logits)
        assert_as_reference(best, logits)
        assert best.logits[[0, 2]].isfinite().all()
        assert best.logits[1].isfinite() == (bad == -torch.inf)
        assert best.token_ids[4] == 0


def test_a_nan_is_worse_than_no_number(team: Team) -> None:
    logits = rows_of(100)
    logits[:, 3], logits[:, 90] = torch.inf, torch.nan
    best = found(team, logits)
    assert best.token_ids.tolist() == [90] * 5
    assert best.logits.isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_a_mask_leaves_out_does_not_show(team: Team, bad: float) -> None:
    logits = rows_of(1003)
    is_allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    logits[~is_allowed] = bad
    best = found(team, logits, mask_of(is_allowed))
    assert_as_reference(best, logits, mask_of(is_allowed))
    assert best.logits.isfinite().all()


def test_only_minus_infinity_is_allowed(team: Team) -> None:
    """A token can be taken by its bit, and yet the row cannot be used."""
    logits = torch.full((2, 50), -torch.inf)
    is_allowed = torch.zeros(2, 50, dtype=torch.bool)
    is_allowed[0, 33:] = True
    best = found(team, logits, mask_of(is_allowed))
    assert best.token_ids.tolist() == [33, -1]
    assert best.logits.isneginf().all()


def test_a_mask_that_is_too_short_is_refused(team: Team) -> None:
    logits = rows_of(65)
    with pytest.raises(ValueError, match="bitmask of allowed tokens"):
        found(team, logits, torch.zeros(5, num_mask_words(65) - 1, dtype=torch.int32))


def test_after_a_product_in_the_same_call(library: Library) -> None:
    """Also in steps of other sizes, and with inputs that need padding."""
    for width in (64, 70):
        generator = torch.Generator().manual_seed(width)
        weight = NativeWeight.of(torch.randn(333, width, generator=generator).bfloat16(), None)
        recorder = TapeRecorder()
        logits = linear(recorder.rows(width), weight)
        best_tokens(logits)
        tape = Tape(recorder.finish(logits), library.new_team(2))
        for num_rows in (1, 9, 2, 80, 3):
            x = torch.randn(num_rows, width, generator=generator)
            best = BestTokens.empty(num_rows)
            made = tape.run(num_rows, inputs=[x], best=best).clone()
            assert torch.equal(made, tape.run(num_rows, inputs=[x]))
            assert_as_reference(best, made)


def test_the_plain_op_agrees_with_its_reference() -> None:
    logits = with_ties(rows_of(1003))
    logits[2, 77] = torch.nan
    assert_as_reference(best_tokens(logits), logits)
    mask = mask_of(rows_of(1003) > 0)
    assert_as_reference(best_tokens(logits, mask), logits, mask)
