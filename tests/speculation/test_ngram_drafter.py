from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drafts import TEXTS, draft_sequence
from naiad.errors import ConfigError
from naiad.speculation.drafter import Drafter
from naiad.speculation.ngram_drafter import NGramDrafter


def draft_by_definition(text: list[int], sizes: tuple[int, ...], num_tokens: int) -> list[int]:
    for size in sizes:
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                longer = list(text)
                for place in range(end, end + num_tokens):
                    longer.append(longer[place])
                return longer[len(text) :]
    return []


@settings(deadline=None)
@given(TEXTS, st.sets(st.integers(1, 6), min_size=1), st.integers(0, 9), st.data())
def test_drafts_are_those_of_the_definition_however_the_text_came(
    text: list[int], sizes: set[int], num_tokens: int, data: st.DataObject
) -> None:
    descending = tuple(sorted(sizes, reverse=True))
    drafter: Drafter = NGramDrafter(descending)
    sequence = draft_sequence(text[:1])
    while True:
        expected = draft_by_definition(sequence.token_ids, descending, num_tokens)
        assert drafter.guess(sequence, num_tokens) == expected
        if sequence.num_tokens == len(text):
            break
        num_known = data.draw(st.integers(sequence.num_tokens + 1, len(text)))
        sequence.token_ids += text[sequence.num_tokens : num_known]


def test_the_longest_ngram_decides_before_the_latest_place() -> None:
    sequence = draft_sequence([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3])
    assert NGramDrafter((3, 2)).guess(sequence, 2) == [70, 9]
    assert NGramDrafter((2,)).guess(sequence, 2) == [80, 1]


def test_a_repeated_line_goes_on_as_often_as_asked() -> None:
    sequence = draft_sequence([4, 5, 6, 4, 5, 6])
    assert NGramDrafter().guess(sequence, 8) == [4, 5, 6, 4, 5, 6, 4, 5]


def test_no_draft_without_an_earlier_occurrence() -> None:
    assert NGramDrafter().guess(draft_sequence([1, 2, 3, 4]), 4) == []


def test_ngrams_of_large_ids_are_not_mixed_up() -> None:
    large = 2**32 - 1
    sequence = draft_sequence([0, large, 7, large, 0, 8, 0, large])
    assert NGramDrafter((2,)).guess(sequence, 1) == [7]


def test_sequences_do_not_see_each_other() -> None:
    drafter = NGramDrafter()
    drafter.guess(draft_sequence([1, 2, 3, 4, 1, 2]), 1)
    assert drafter.guess(draft_sequence([3, 4, 1, 2]), 1) == []


def test_forget_gives_back_everything() -> None:
    drafter = NGramDrafter()
    sequences = [draft_sequence([1, 2, 1, 2]) for _ in range(3)]
    for sequence in sequences:
        drafter.guess(sequence, 1)
    for sequence in sequences:
        drafter.forget(sequence)
    drafter.forget(draft_sequence([1]))
    assert drafter._indexes == {}


@pytest.mark.asserts
def test_fewer_tokens_than_before_are_our_bug() -> None:
    drafter = NGramDrafter()
    sequence = draft_sequence([1, 2, 3])
    drafter.guess(sequence, 1)
    sequence.token_ids.pop()
    with pytest.raises(AssertionError, match="never get fewer"):
        drafter.guess(sequence, 1)


@pytest.mark.parametrize("sizes", [(), (2, 3), (3, 3), (2, 0)])
def test_sizes_that_do_not_descend_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="descending"):
        NGramDrafter(sizes)
