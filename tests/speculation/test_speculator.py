from __future__ import annotations

import msgspec
import pytest

from helpers.draft_costs import FLAT, PROPORTIONAL
from helpers.drafts import draft_sequence
from naiad.sequence import Sequence
from naiad.speculation.drafter import TextDrafter
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost


class CountingDrafter(TextDrafter):
    """Has a draft for every sequence, and counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        self.num_asked += 1
        return [1] * num_tokens

    def num_read(self, sequence: Sequence) -> int:
        return sequence.num_tokens

    def forget(self, sequence: Sequence) -> None:
        pass


def times_asked(cost: StepCost, crowds: list[int]) -> list[int]:
    """For steps with these numbers of sequences, how many the drafter was asked about."""
    drafter = CountingDrafter()
    speculator = Speculator(drafter, SpeculationPolicy(cost, probe_share=0.0), 4)
    everybody = [draft_sequence([1, 2], [3]) for _ in range(max(crowds))]
    asked = []
    for size in crowds:
        before = drafter.num_asked
        speculator.drafts(everybody[:size], [9] * size, 1000, size)
        asked.append(drafter.num_asked - before)
    return asked


def test_in_a_crowd_where_nothing_pays_the_drafter_rests_ever_longer() -> None:
    asked = times_asked(PROPORTIONAL, [16] * 200)
    assert [step for step, num in enumerate(asked) if num] == [0, 8, 24, 56, 120, 184]
    assert set(asked) == {0, 16}


def test_a_guess_of_a_client_that_does_not_pay_lets_nobody_rest_longer() -> None:
    drafter = CountingDrafter()
    speculator = Speculator(drafter, SpeculationPolicy(PROPORTIONAL, probe_share=0.0), 4)
    crowd = [draft_sequence([1, 2], [3]) for _ in range(16)]
    asked = []
    for _ in range(9):
        crowd[0].offered_token_ids = (3, 4, 5)
        before = drafter.num_asked
        speculator.drafts(crowd, [9] * 16, 1000, 16)
        asked.append(drafter.num_asked > before)
    assert asked == [True, *[False] * 7, True]


def test_a_smaller_crowd_is_asked_at_once_and_a_larger_one_not() -> None:
    assert times_asked(PROPORTIONAL, [16, 17, 12, 13, 3, 3]) == [16, 0, 12, 0, 3, 3]


@pytest.mark.parametrize("size", [1, 7])
def test_few_are_always_asked(size: int) -> None:
    assert times_asked(PROPORTIONAL, [size] * 4) == [size] * 4


def test_where_drafts_pay_nobody_rests() -> None:
    assert times_asked(FLAT, [16] * 4) == [16] * 4


def test_a_sequence_that_asks_for_no_drafts_gets_no_plan() -> None:
    speculator = Speculator(CountingDrafter(), SpeculationPolicy(FLAT), 4)
    sequence = draft_sequence([1, 2], [3])
    assert speculator.may_draft(sequence)
    sequence.params = msgspec.structs.replace(sequence.params, num_draft_tokens=0)
    assert not speculator.may_draft(sequence)


class ModelLikeDrafter(CountingDrafter):
    """Costs passes, as a draft model does."""

    is_free = False

    def num_unread(self, sequence: Sequence) -> int | None:
        return 0


def begun_with_drafts(
    speculator: Speculator, num_sequences: int, *, are_right: bool, num_windows: int = 2
) -> list[bool]:
    """Whether the first steps of new sequences, one after the other, have drafts."""
    begun = []
    for _ in range(num_sequences):
        sequence = draft_sequence([1, 2], [3])
        (draft,) = speculator.drafts([sequence], [1000], 1000, 1)
        begun.append(bool(draft))
        for _ in range(num_windows):
            speculator.judged(sequence, 2, 2 * are_right)
        speculator.forget(sequence)
    return begun


def test_a_draft_model_is_trusted_until_it_has_been_wrong_and_tried_again_now_and_then() -> None:
    """A pass costs half of a step here, so at least one token of two must be right."""
    policy = SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=StepCost([(1, 0.5), (100_000, 0.5)]))
    speculator = Speculator(ModelLikeDrafter(), policy, 2)
    begun = begun_with_drafts(speculator, 97, are_right=False)
    assert begun[0]
    assert [number for number, has in enumerate(begun) if has and number > 16] == [32, 64, 96]
    # Only what the model has drafted counts.
    assert not any(begun_with_drafts(speculator, 10, are_right=True, num_windows=60))
    assert any(begun_with_drafts(speculator, 32, are_right=True, num_windows=60))
    assert all(begun_with_drafts(speculator, 10, are_right=True))


class UnreadDrafter(ModelLikeDrafter):
    """Would have to read so much of every sequence before its first pass."""

    def __init__(self, num_unread: int) -> None:
        super().__init__()
        self._num_unread = num_unread
        self.num_looks = 0

    def num_unread(self, sequence: Sequence) -> int:
        self.num_looks += 1
        return self._num_unread


def looked_at(drafter: UnreadDrafter, steps: list[list[Sequence]]) -> list[int]:
    """The steps with these sequences in which a model is thought of that is not worth its reading."""
    dear = StepCost([(1, 0.5), (100_000, 50_000.0)])
    speculator = Speculator(drafter, SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=dear), 4)
    looked = []
    for number, sequences in enumerate(steps):
        before = drafter.num_looks
        speculator.drafts(sequences, [9] * len(sequences), 1000, len(sequences))
        looked += [number] if drafter.num_looks > before else []
    return looked


def test_a_model_that_would_have_to_read_too_much_rests_ever_longer() -> None:
    sequence = draft_sequence([1, 2], [3])
    assert looked_at(UnreadDrafter(5000), [[sequence]] * 130) == [0, 8, 24, 56, 120]


def test_other_sequences_end_its_rest() -> None:
    first, second = draft_sequence([1, 2], [3]), draft_sequence([4, 5], [6])
    steps = [[first], [first], [first, second], [second], [second], [first]]
    assert looked_at(UnreadDrafter(5000), steps) == [0, 2, 3, 5]


def test_a_model_that_is_nearly_up_to_date_does_not_rest() -> None:
    sequence = draft_sequence([1, 2], [3])
    assert looked_at(UnreadDrafter(1), [[sequence]] * 10) == [*range(10)]


def test_a_guess_of_a_client_does_not_let_the_model_rest() -> None:
    """One sequence is up to date, and its client guesses now and then; the other would have to be read."""
    near, far = draft_sequence([1, 2], [3]), draft_sequence([4, 5], [6])

    class Near(UnreadDrafter):
        def num_unread(self, sequence: Sequence) -> int:
            return 0 if sequence is near else super().num_unread(sequence)

    cost = StepCost([(1, 0.1), (100_000, 50_000.0)])
    speculator = Speculator(Near(5000), SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=cost), 4)
    drafted = []
    for number in range(16):
        near.offered_token_ids = (3, 4, 5) if number % 4 == 0 else ()
        drafted.append(bool(speculator.drafts([near, far], [9, 9], 1000, 2)[0]))
    assert drafted == [True] * 16


def test_a_step_with_more_tokens_ends_the_rest_of_the_model() -> None:
    sequence = draft_sequence([1, 2], [3])
    drafter = UnreadDrafter(5000)
    dear = StepCost([(1, 0.5), (100_000, 50_000.0)])
    speculator = Speculator(drafter, SpeculationPolicy(FLAT, probe_share=0.0, pass_cost=dear), 4)
    for num_tokens in (1, 1, 33, 1):
        speculator.drafts([sequence], [9], 1000, num_tokens)
    assert drafter.num_looks == 3


def test_a_record_fades_also_while_the_model_rests() -> None:
    sequence = draft_sequence([1, 2], [3])
    dear = StepCost([(1, 0.5), (100_000, 50_000.0)])
    speculator = Speculator(UnreadDrafter(5000), SpeculationPolicy(FLAT, pass_cost=dear), 4)
    state = speculator._state_of(sequence)
    for _ in range(20):
        state.update(4, 0)
    low, first = state.rate, state.first_rate
    for _ in range(2000):
        speculator.drafts([sequence], [9], 1000, 1)
    assert low < 0.1
    assert state.rate == pytest.approx(first, abs=0.01)
