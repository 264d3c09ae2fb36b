from __future__ import annotations

import gc
import re
import weakref

from hypothesis import given
from hypothesis import strategies as st

from naiad.tokenization.stop_matcher import StopMatcher, StopStrings

LETTERS = st.text("abc", max_size=40)
STRINGS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=5)


@given(STRINGS, LETTERS, st.integers(0, 40))
def test_the_first_end_of_a_string_is_found(strings: list[str], text: str, cut: int) -> None:
    matcher = StopMatcher(strings)
    read, found = matcher.feed(text[:cut])
    if found is None:
        more, found = matcher.feed(text[cut:])
        read += more
    ends = [match.start() + len(each) for each in strings for match in re.finditer(f"(?={each})", text)]
    assert read == (min(ends) if ends else len(text))
    if ends:
        assert found == max((each for each in strings if text[:read].endswith(each)), key=len)
    else:
        assert found is None


def test_sequences_with_the_same_strings_share_what_is_known_of_them() -> None:
    """A request may have many sequences, and building takes milliseconds."""
    first, second = StopMatcher(["ab", "b"]), StopMatcher(["ab", "b"])
    assert first._strings is second._strings
    assert StopMatcher(["b", "ab"])._strings is not first._strings
    assert first.feed("a") == (1, None)
    assert (first.num_open_chars, second.num_open_chars) == (1, 0)
    kept = weakref.ref(first._strings)
    del first
    assert kept() is not None
    del second
    gc.collect()
    assert kept() is None
    assert ("ab", "b") not in StopStrings._shared
