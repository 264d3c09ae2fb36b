from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.drafts import TEXTS, ends
from naiad.speculation.suffix_automaton import MAX_COUNT, ROOT, Follower, SuffixAutomaton


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def state_of(automaton: SuffixAutomaton, substring: list[int]) -> int:
    state = ROOT
    for token in substring:
        state = automaton.follow(state, token)
        if state == ROOT:
            break
    return state


def substrings(text: list[int]) -> list[list[int]]:
    distinct = {
        tuple(text[start:end]) for start in range(len(text)) for end in range(start + 1, len(text) + 1)
    }
    return [list(each) for each in distinct]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=24))
def test_substrings_share_a_state_where_they_end_at_the_same_places(text: list[int]) -> None:
    automaton = automaton_of(text)
    for substring in substrings(text):
        state = state_of(automaton, substring)
        assert state != ROOT
        longest = text[ends(text, substring)[0] - automaton.length(state) : ends(text, substring)[0]]
        assert longest[len(longest) - len(substring) :] == substring
        assert ends(text, longest) == ends(text, substring)
        suffix = longest[len(longest) - automaton.length(automaton.link(state)) :]
        assert len(suffix) == 0 or len(ends(text, suffix)) > len(ends(text, substring))
        assert state_of(automaton, suffix) == automaton.link(state)
        assert ends(text, longest[-len(suffix) - 1 :]) == ends(text, substring)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_what_is_no_substring_is_not_found(text: list[int], other: list[int]) -> None:
    assert (state_of(automaton_of(text), other) != ROOT) == bool(ends(text, other))


@settings(deadline=None)
@given(TEXTS)
@example([0, 1] * (2 * MAX_COUNT))
def test_the_best_follower_came_most_often_and_of_equals_last(text: list[int]) -> None:
    automaton = automaton_of(text)
    for substring in substrings(text[:8]):
        followers = [text[end] for end in ends(text, substring) if end < len(text)]
        times = {token: min(followers.count(token), MAX_COUNT) for token in followers}
        best = automaton.best_follower(state_of(automaton, substring))
        if not followers:
            assert best is None
            continue
        expected = max(times, key=lambda token: (times[token], followers.index(token)))
        state = state_of(automaton, [*substring, expected])
        assert best == Follower(expected, state, times[expected], sum(times.values()), len(times))


@settings(deadline=None)
@given(TEXTS)
def test_the_repeated_suffix_is_the_longest_that_occurs_earlier(text: list[int]) -> None:
    automaton = automaton_of(text)
    earlier = [size for size in range(len(text)) if len(ends(text, text[len(text) - size :])) > 1]
    assert automaton.length(automaton.repeated) == max(earlier)


def test_many_different_followers_are_no_prediction() -> None:
    at_the_limit = [token for number in range(MAX_COUNT) for token in (0, number + 1)]
    automaton = automaton_of(at_the_limit)
    best = automaton.best_follower(automaton.follow(ROOT, 0))
    assert best is not None
    assert best.num_followers == MAX_COUNT
    automaton = automaton_of([*at_the_limit, 0, 99])
    assert automaton.best_follower(automaton.follow(ROOT, 0)) is None


def test_memory_is_linear_in_the_text() -> None:
    draw = random.Random(1)
    texts = [[draw.randrange(size) for _ in range(2000)] for size in (1, 2, 5, 300)]
    texts.append([0] * 1000 + [1] * 1000)
    # The text with the most followers: a b … b c.
    texts.append([0] + [1] * 1998 + [2])
    for text in texts:
        automaton = automaton_of(text)
        num_followers = sum(target != ROOT for target in automaton._targets)
        num_followers += sum(map(len, automaton._more.values()))
        assert len(automaton._lengths) <= 2 * len(text)
        assert num_followers <= 3 * len(text)
