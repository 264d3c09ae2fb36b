"""When the draft model is used, for how many tokens, and how failures are handled; with a fake model."""

from __future__ import annotations

import random

import msgspec
import pytest

from helpers.drafts import draft_sequence
from helpers.engine_drive import solo_tokens
from helpers.fake_draft_runner import FakeDraftRunner
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.outputs import ModelOutput, StepBatch
from naiad.sequence import Sequence
from naiad.speculation.draft_slots import DraftSlots
from naiad.speculation.model_drafter import ModelDrafter
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost

FLAT = StepCost([(1, 1.0), (100_000, 1.0)])
DEAR = StepCost([(1, 2.0)])


class Desk:
    """A drafter with a fake model that has its own cache, and its sequences."""

    def __init__(
        self, num_blocks: int = 64, max_caught_up_tokens: int = 256, failure_rate: float = 0.0
    ) -> None:
        self.kv_cache = KVCacheManager(num_blocks, 4)
        self.runner = FakeDraftRunner(self.kv_cache, None, random.Random(0), failure_rate=failure_rate)
        self.drafter = ModelDrafter(
            self.runner, self.kv_cache, DraftSlots(self.kv_cache), max_caught_up_tokens
        )

    def add(self, num_prompt_tokens: int, num_output_tokens: int = 1) -> Sequence:
        """Add a sequence that has computed all but its last token."""
        prompt = [(3 * place) % 50 for place in range(num_prompt_tokens)]
        sequence = draft_sequence(prompt, solo_tokens(prompt, num_output_tokens))
        assert self.kv_cache.admit(sequence) is not None
        sequence.num_computed_tokens = sequence.num_tokens - 1
        return sequence

    def speculator(self, pass_cost: StepCost | None = None) -> Speculator:
        return Speculator(self.drafter, SpeculationPolicy(FLAT, 0.0, pass_cost), 4)


def right(sequence: Sequence, num_tokens: int) -> list[int]:
    return solo_tokens(sequence.token_ids, num_tokens)


def test_all_sequences_draft_in_one_pass_for_each_place() -> None:
    desk = Desk()
    sequences = [desk.add(3 + number) for number in range(5)]
    drafts = desk.drafter.propose(sequences, [4, 2, 0, 1, 4])
    assert drafts == [right(sequence, num) for sequence, num in zip(sequences, [4, 2, 0, 1, 4], strict=True)]
    assert [len(rows) for rows in desk.runner.steps] == [4, 3, 2, 2]


def test_it_is_asked_for_nothing_that_is_not_used() -> None:
    desk = Desk()
    sequences = [desk.add(10), desk.add(20)]
    assert desk.speculator(DEAR).drafts(sequences, [50, 50], 100, 2) == [[], []]
    assert desk.runner.num_passes == 0
    assert [len(draft) for draft in desk.speculator().drafts(sequences, [50, 2], 100, 2)] == [4, 2]
    assert desk.runner.num_passes == 4


def test_no_drafts_for_a_first_token_and_none_without_room() -> None:
    desk = Desk()
    first, running = desk.add(5, num_output_tokens=0), desk.add(5)
    assert desk.speculator().drafts([first, running], [50, 50], 100, 2) == [[], right(running, 4)]
    assert desk.speculator().drafts([running], [50], 0, 2) == [[]]
    assert desk.speculator().drafts([running], [0], 100, 2) == [[]]


def test_drafts_take_free_blocks_and_no_more() -> None:
    desk = Desk(num_blocks=4)
    one, other = desk.add(6), desk.add(3)
    # Each sequence has at most one slot left in its last block; one block is free.
    assert [len(one.block_table), len(other.block_table)] == [2, 1]
    drafts = desk.drafter.propose([one, other], [4, 4])
    assert [len(draft) for draft in drafts] == [4, 0]
    assert desk.kv_cache.num_free_blocks == 0


def test_a_draft_ends_with_the_text() -> None:
    desk = Desk()
    sequence = desk.add(9)
    expected = right(sequence, 8)
    sequence.params = msgspec.structs.replace(sequence.params, stop_token_ids=(expected[2],))
    end = expected.index(expected[2]) + 1
    assert desk.drafter.propose([sequence], [8]) == [expected[:end]]


def test_reading_is_bounded_in_each_step_and_those_in_step_do_not_wait() -> None:
    desk = Desk(max_caught_up_tokens=40)
    short, long, longer = desk.add(10), desk.add(99), desk.add(60)
    proposals = []
    for _ in range(4):
        desk.runner.steps.clear()
        proposals.append([len(draft) for draft in desk.drafter.propose([short, long, longer], [2, 2, 2])])
        assert sum(num for rows in desk.runner.steps for _, num in rows) <= 40 + 11 + 5
    assert proposals == [[2, 0, 0], [2, 0, 0], [2, 2, 0], [2, 2, 2]]


def test_only_what_is_missing_is_read() -> None:
    desk = Desk()
    sequence = desk.add(30)
    desk.drafter.propose([sequence], [3])
    desk.runner.steps.clear()
    sequence.token_ids += right(sequence, 2)
    assert desk.drafter.num_unread(sequence) == 1
    desk.drafter.propose([sequence], [3])
    assert [rows[0][1] for rows in desk.runner.steps] == [2, 1, 1]


def test_a_pass_that_raises_costs_the_steps_drafts_and_three_all(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(failure_rate=1.0)
    sequence = desk.add(10)
    for number in range(1, 4):
        assert desk.drafter.num_unread(sequence) == 10
        assert desk.drafter.propose([sequence], [3]) == [[]]
        assert desk.drafter.num_failures == number
    assert desk.drafter.num_unread(sequence) is None
    assert desk.speculator().drafts([sequence], [50], 100, 1) == [[]]
    assert desk.runner.num_passes == 3
    assert "this step goes on without drafts: RuntimeError at helpers/fake_draft_runner.py:" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_model_that_reads_and_then_raises_in_every_step_is_not_asked_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    sequence = desk.add(10)
    run = desk.runner.run

    def raise_while_drafting(output: StepBatch) -> ModelOutput:
        if output.rows[0].start >= sequence.num_tokens:
            raise RuntimeError("the draft model has failed")
        return run(output)

    monkeypatch.setattr(desk.runner, "run", raise_while_drafting)
    for _ in range(3):
        assert desk.drafter.num_unread(sequence) is not None
        assert len(desk.drafter.propose([sequence], [3])[0]) == 1
    assert desk.drafter.num_unread(sequence) is None


def test_our_own_bug_is_not_taken_for_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()

    def run(output: StepBatch) -> ModelOutput:
        raise AssertionError("a bug")

    monkeypatch.setattr(desk.runner, "run", run)
    with pytest.raises(AssertionError, match="a bug"):
        desk.drafter.propose([desk.add(10)], [3])


def test_a_failed_row_ends_its_sequences_drafts_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    sequences = [desk.add(10), desk.add(11)]
    draw = iter([1.0, 0.0, 1.0, *[1.0] * 100])
    monkeypatch.setattr(desk.runner._rng, "random", lambda: next(draw))
    desk.runner._failure_rate = 0.5
    assert [len(draft) for draft in desk.drafter.propose(sequences, [3, 3])] == [0, 1]
    assert desk.drafter.num_failures == 1
    assert [desk.drafter.num_unread(each) for each in sequences] == [None, 0]
    assert desk.drafter.propose(sequences[1:], [3]) == [right(sequences[1], 3)]
    desk.drafter.forget(sequences[0])
    assert desk.drafter.num_unread(sequences[0]) == 10


def test_the_targets_own_cache_is_read_only_when_it_is_there() -> None:
    desk = Desk()
    drafter = ModelDrafter(desk.runner, desk.kv_cache, None)
    sequence = desk.add(8)
    assert drafter.num_unread(sequence) == 0
    sequence.num_computed_tokens -= 1
    assert drafter.num_unread(sequence) is None


def test_the_targets_own_cache_is_not_written_while_blocks_wait_to_be_copied() -> None:
    desk = Desk()
    drafter = ModelDrafter(desk.runner, desk.kv_cache, None)
    sequence = desk.add(8)
    sibling = draft_sequence(sequence.token_ids[:-2])
    assert desk.kv_cache.fork(sibling, sequence) == 6
    assert drafter.num_unread(sequence) is None
    assert len(desk.kv_cache.take_copies()) == 1
    assert drafter.num_unread(sequence) == 0
