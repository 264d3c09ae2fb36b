from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drafts import TEXTS, draft_sequence, ends
from naiad.errors import ConfigError
from naiad.speculation.drafter import MAX_READ_TOKENS, Drafter
from naiad.speculation.ngram_drafter import NGramDrafter
from naiad.speculation.shared_outputs import END
from naiad.speculation.suffix_automaton import MAX_COUNT
from naiad.speculation.suffix_drafter import MAX_MATCH, SuffixDrafter


def longest_end(known: list[int], text: list[int], num_times: int) -> list[int]:
    """The longest suffix of the known tokens that occurs at least `num_times` in the text."""
    for start in range(len(known)):
        if len(ends(text, known[start:])) >= num_times:
            return known[start:]
    return []


def draft_by_definition(
    known: list[int], earlier: list[list[int]], num_tokens: int, min_chance: float
) -> list[int]:
    shared = [token_id for output in earlier for token_id in [*output, END]]
    text, context = known, longest_end(known, known, 2)
    length = min(len(context), MAX_MATCH)
    match = longest_end(known[-MAX_MATCH:], shared, 1)
    if len(match) > length:
        text, context, length = shared, match, len(match)
    draft: list[int] = []
    chance = 1.0
    while context and len(draft) < num_tokens:
        followers = [text[end] for end in ends(text, context) if end < len(text)]
        if not followers:
            context = longest_end(context, text, len(ends(text, context)) + 1)
            length = len(context)
            continue
        times = {token: min(followers.count(token), MAX_COUNT) for token in followers}
        best = max(times, key=lambda token: (times[token], followers.index(token)))
        chance *= times[best] / (sum(times.values()) + 3 * len(times) / length)
        if chance < min_chance or best == END:
            break
        draft.append(best)
        context = [*context, best]
        length += 1
    return draft


@settings(deadline=None)
@given(
    TEXTS,
    st.lists(st.tuples(st.sampled_from("ab"), TEXTS), max_size=4),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.05, 0.2, 0.6]),
    st.data(),
)
def test_drafts_are_those_of_the_definition_however_the_texts_came(
    text: list[int],
    others: list[tuple[str, list[int]]],
    num_tokens: int,
    min_chance: float,
    data: st.DataObject,
) -> None:
    drafter: Drafter = SuffixDrafter(min_chance=min_chance)
    sequence = draft_sequence(text[:1], salt="a")
    earlier: list[list[int]] = []
    while True:
        expected = draft_by_definition(sequence.token_ids, earlier, num_tokens, min_chance)
        assert drafter.guess(sequence, num_tokens) == expected
        if others and data.draw(st.booleans()):
            salt, output = others.pop()
            drafter.forget(draft_sequence([9], output, salt))
            earlier += [output] if salt == "a" else []
        elif sequence.num_tokens == len(text):
            break
        else:
            num_known = data.draw(st.integers(sequence.num_tokens + 1, len(text)))
            sequence.token_ids += text[sequence.num_tokens : num_known]


def test_the_most_frequent_continuation_is_followed() -> None:
    sequence = draft_sequence([1, 2, 7, 1, 2, 8, 1, 2, 7, 1, 2, 9, 1, 2])
    assert SuffixDrafter(min_chance=0.0).guess(sequence, 1) == [7]


def test_a_draft_ends_where_it_is_unlikely() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 70, 4, 5, 6, 7, 71, 1, 2, 3, 4]
    assert SuffixDrafter(min_chance=0.2).guess(draft_sequence(prompt), 8) == [5, 6, 7]
    assert len(SuffixDrafter(min_chance=0.0).guess(draft_sequence(prompt), 8)) == 8


def test_a_repeated_line_goes_on_as_often_as_asked() -> None:
    sequence = draft_sequence([4, 5, 6] * 8)
    assert SuffixDrafter().guess(sequence, 10) == [4, 5, 6, 4, 5, 6, 4, 5, 6, 4]


def test_an_earlier_output_of_the_same_tenant_is_followed() -> None:
    drafter = SuffixDrafter()
    drafter.forget(draft_sequence([50, 51], [1, 2, 3, 4, 5, 6, 7, 8, 9], salt="a"))
    assert drafter.guess(draft_sequence([1, 2, 3, 4, 5], salt="a"), 8) == [6, 7, 8, 9]


def test_a_match_with_earlier_outputs_is_no_longer_than_its_bound() -> None:
    drafter, shared = SuffixDrafter(min_chance=0.0), list(range(100, 100 + MAX_MATCH))
    for first, last in ((1, 11), (2, 12), (3, 12)):
        drafter.forget(draft_sequence([0], [first, *shared, last]))
    sequence = draft_sequence([1])
    for token_id in shared:
        drafter.guess(sequence, 1)
        sequence.token_ids.append(token_id)
    assert drafter.guess(sequence, 1) == [12]
    assert drafter.guess(draft_sequence([1, *shared]), 1) == [12]
    assert drafter.guess(draft_sequence([1, *shared[:-1]]), 2) == [shared[-1], 11]


def test_of_a_long_output_the_end_is_kept() -> None:
    drafter = SuffixDrafter()
    drafter.forget(draft_sequence([0], list(range(1, MAX_READ_TOKENS + 11))))
    assert drafter.guess(draft_sequence(list(range(11, 20))), 1) == [20]
    assert drafter.guess(draft_sequence(list(range(1, 10))), 1) == []


def test_outputs_that_come_while_a_sequence_runs_are_followed() -> None:
    drafter, sequence = SuffixDrafter(min_chance=0.0), draft_sequence([1, 2, 3])
    for output, follows in (([3, 40, 3, 40, 3, 40], 40), ([2, 3, 50, 2, 3, 50], 50), ([1, 2, 3, 60], 60)):
        drafter.forget(draft_sequence([0], output))
        assert drafter.guess(sequence, 1) == [follows]


def test_a_prompt_of_an_ended_sequence_is_not_kept() -> None:
    drafter = SuffixDrafter()
    drafter.forget(draft_sequence([1, 2, 3, 4, 5], [50]))
    assert drafter.guess(draft_sequence([1, 2, 3]), 8) == []


def test_no_output_of_one_tenant_changes_drafts_of_another() -> None:
    drafter, alone = SuffixDrafter(), SuffixDrafter()
    mine, same = (draft_sequence([1, 2, 3, 8, 2, 3], salt="mine") for _ in range(2))
    for token_id in (1, 2, 3, 8, 2):
        drafter.forget(draft_sequence([7], [1, 2, 3, 4, 5, 2, 3, 4, 4], salt="other"))
        assert drafter.guess(mine, 8) == alone.guess(same, 8)
        mine.token_ids.append(token_id)
        same.token_ids.append(token_id)


def test_a_dropped_output_is_not_followed_and_not_kept_alive() -> None:
    drafter = SuffixDrafter(max_shared_tokens=40)
    sequence = draft_sequence([1, 2, 3])
    drafter.forget(draft_sequence([0], [1, 2, 3, 4]))
    assert drafter.guess(sequence, 1) == [4]
    (part,) = (weakref.ref(part) for part in drafter._shared.parts("").values())
    for token_id in range(100, 160):
        drafter.forget(draft_sequence([0], [token_id] * 4))
    gc.collect()
    assert part() is None
    assert drafter.guess(sequence, 1) == []


def test_forget_gives_back_all_but_the_shared_outputs() -> None:
    drafter = SuffixDrafter(max_shared_tokens=12)
    sequences = [draft_sequence([1, 2, 1, 2], [3, 1]) for _ in range(9)]
    for sequence in sequences:
        drafter.guess(sequence, 1)
    for sequence in sequences:
        drafter.forget(sequence)
    assert drafter._readers == {}
    assert drafter._shared.num_tokens <= 12


@pytest.mark.parametrize("drafter", [NGramDrafter(), SuffixDrafter()], ids=["ngram", "suffix"])
def test_a_long_prompt_is_taken_in_over_several_calls(drafter: Drafter) -> None:
    sequence = draft_sequence([*range(3 * MAX_READ_TOKENS), *range(1000, 1010)])
    assert [drafter.guess(sequence, 3) for _ in range(4)] == [[], [], [], [1010, 1011, 1012]]


@pytest.mark.parametrize("drafter", [NGramDrafter(), SuffixDrafter()], ids=["ngram", "suffix"])
def test_long_prompts_that_come_together_are_taken_in_one_after_the_other(drafter: Drafter) -> None:
    """Meanwhile a text without many unread tokens gets drafts immediately."""
    long = [draft_sequence([*range(MAX_READ_TOKENS - 5), *range(number, number + 5)]) for number in (0, 100)]
    short = draft_sequence([7, 8, 9, 7, 8])
    guesses = [drafter.propose([long[0], short, long[1]], [2, 1, 2]) for _ in range(2)]
    assert guesses == [[[5, 6], [9], []], [[5, 6], [9], [105, 106]]]


@pytest.mark.asserts
def test_fewer_tokens_than_before_are_our_bug() -> None:
    drafter = SuffixDrafter()
    sequence = draft_sequence([1, 2, 3])
    drafter.guess(sequence, 1)
    sequence.token_ids.pop()
    with pytest.raises(AssertionError, match="never get fewer"):
        drafter.guess(sequence, 1)


@pytest.mark.parametrize(
    ("max_shared_tokens", "min_chance", "key"), [(-1, 0.5, "max_shared_tokens"), (0, 1.5, "min_chance")]
)
def test_settings_out_of_range_are_refused(max_shared_tokens: int, min_chance: float, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        SuffixDrafter(max_shared_tokens, min_chance)


def test_outputs_that_end_together_are_taken_in_over_several_steps() -> None:
    drafter = SuffixDrafter()
    ended = [draft_sequence([1], [10 * number + 1000, *range(4095)]) for number in range(3)]
    for sequence in ended:
        drafter.forget(sequence)
    assert drafter._shared.num_tokens == 4097
    for num_outputs in (2, 3, 3):
        drafter.propose([], [])
        assert drafter._shared.num_tokens == num_outputs * 4097
    drafter.forget(draft_sequence([1], list(range(4000)), num_candidates=2))
    assert drafter._shared.num_tokens == 3 * 4097


def test_many_tenants_with_little_text_have_few_automata() -> None:
    drafter = SuffixDrafter(max_shared_tokens=1600)
    for number in range(300):
        drafter.forget(draft_sequence([1], [2], salt=str(number)))
    assert sum(bool(drafter._shared.parts(str(number))) for number in range(300)) == 100


def test_sequences_share_nothing_while_they_live() -> None:
    drafter = SuffixDrafter()
    other = draft_sequence([9], [1, 2, 3, 4])
    drafter.guess(other, 4)
    assert drafter.guess(draft_sequence([1, 2, 3]), 4) == []
