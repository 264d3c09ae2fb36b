from __future__ import annotations

import pytest

from naiad.errors import InvalidRequestError
from naiad.sequence import TextContext
from naiad.tokenization import TextStream, TokenTable, context_ids, decode_chunk


class CountingTable(TokenTable):
    """Counts how often a token is looked at."""

    num_lookups = 0

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        self.num_lookups += 1
        return super().visible_bytes(token_id, skip_special_tokens)


def byte_table(special_ids: frozenset[int] = frozenset({256})) -> CountingTable:
    """Ids 0 … 255 are their bytes; 256 is a special token."""
    return CountingTable([*(bytes([byte]) for byte in range(256)), b"<s>"], {}, special_ids)


def stream_with(*stop_strings: str) -> TextStream:
    return TextStream(byte_table(), TextContext(stop_strings=stop_strings))


def test_without_stop_strings_tokens_pass_at_once_and_uncounted() -> None:
    stream = stream_with()
    assert stream.push([0xF0, 0x9F], False).token_ids == [0xF0, 0x9F]
    chunk = stream.push([0x98], False)
    assert (chunk.window_ids, chunk.num_chars, chunk.is_cut) == ([0xF0, 0x9F], -1, False)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = stream_with("END")
    assert stream.push(list(b"xE"), False).token_ids == list(b"x")
    assert stream.push(list(b"N"), False).token_ids == []


def test_held_tokens_go_once_they_are_decided() -> None:
    stream = stream_with("END")
    stream.push(list(b"xEN"), False)
    chunk = stream.push(list(b"T"), False)
    assert (chunk.token_ids, chunk.window_ids, chunk.num_chars) == (list(b"ENT"), list(b"x"), 3)


def test_the_end_flushes_held_tokens() -> None:
    stream = stream_with("END")
    stream.push(list(b"EN"), False)
    chunk = stream.push([], True)
    assert (chunk.token_ids, chunk.num_chars, chunk.is_cut) == (list(b"EN"), 2, False)


def test_a_match_cuts_the_text_and_sends_its_tokens() -> None:
    stream = stream_with("END")
    stream.push(list(b"abE"), False)
    chunk = stream.push(list(b"NDxyz"), False)
    assert (chunk.token_ids, chunk.num_chars, chunk.stop_reason) == (list(b"END"), 0, "END")
    assert chunk.is_cut


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("abcd", "bc"), "xabcd", ("bc", 2)),
        (("bc", "abc"), "xabc", ("abc", 1)),
        (("abab", "ac"), "aabac", ("ac", 3)),
        (("\n\n", "\n"), "a\n\n", ("\n", 1)),
    ],
)
def test_the_first_complete_stop_string_wins_and_of_equals_the_longest(
    stops: tuple[str, ...], text: str, expected: tuple[str, int]
) -> None:
    chunk = stream_with(*stops).push(list(text.encode()), True)
    assert (chunk.stop_reason, chunk.num_chars) == expected


def including(*stop_strings: str) -> TextStream:
    return TextStream(byte_table(), TextContext(stop_strings=stop_strings, includes_stop_string=True))


def test_nothing_is_held_back_when_the_stop_string_is_part_of_the_text() -> None:
    stream = including("END")
    chunk = stream.push(list(b"xEN"), False)
    assert (chunk.token_ids, chunk.num_chars, chunk.is_cut) == (list(b"xEN"), 3, False)
    chunk = stream.push(list(b"Dyz"), False)
    assert (chunk.token_ids, chunk.num_chars, chunk.stop_reason) == (list(b"D"), 1, "END")
    assert chunk.is_cut


def test_text_behind_an_included_stop_string_is_cut_inside_a_token() -> None:
    table = TokenTable([b"a", b"END of it"], {}, frozenset())
    stream = TextStream(table, TextContext(stop_strings=("END",), includes_stop_string=True))
    chunk = stream.push([0, 1], False)
    assert (chunk.token_ids, chunk.num_chars, chunk.is_cut) == ([0, 1], 4, True)


def test_an_included_replacement_character_at_the_end_can_match() -> None:
    stream = including("\ufffd")
    assert stream.push([0x61, 0xE4], False).num_chars == 1
    chunk = stream.push([], True)
    assert (chunk.token_ids, chunk.num_chars, chunk.is_cut) == ([], 1, True)


def test_prompt_text_is_no_part_of_a_match() -> None:
    context = TextContext(stop_strings=("END",), prompt_tail_ids=tuple(b"EN"))
    chunk = TextStream(byte_table(), context).push(list(b"D"), False)
    assert (chunk.token_ids, chunk.is_cut) == (list(b"D"), False)


def test_a_character_begun_in_the_prompt_may_match() -> None:
    data = "é".encode()
    context = TextContext(stop_strings=("é",), prompt_tail_ids=(data[0],))
    chunk = TextStream(byte_table(), context).push([data[1]], False)
    assert (chunk.is_cut, chunk.num_chars) == (True, 0)


def test_an_unfinished_character_does_not_hold_its_tokens() -> None:
    chunk = stream_with("END").push([0x61, 0xE4], False)
    assert (chunk.token_ids, chunk.num_chars) == ([0x61, 0xE4], 1)


def test_a_replacement_character_at_the_end_can_match() -> None:
    chunk = stream_with("\ufffd").push([0x61, 0xE4], True)
    assert (chunk.is_cut, chunk.num_chars) == (True, 1)


@pytest.mark.asserts
def test_nothing_may_follow_the_end() -> None:
    stream = stream_with("x")
    stream.push(list(b"x"), False)
    with pytest.raises(AssertionError):
        stream.push([0x61], False)


@pytest.mark.parametrize("token_id", [0x61, 0x80, 256])
@pytest.mark.parametrize("stops", [(), ("aaaaaaaaab",), ("a" * 200 + "b",)])
def test_a_push_costs_no_more_late_than_early(token_id: int, stops: tuple[str, ...]) -> None:
    table = byte_table()
    stream = TextStream(table, TextContext(stop_strings=stops))
    for _ in range(3000):
        stream.push([token_id], False)
    assert table.num_lookups < 12 * 3000


def test_context_is_short_and_reaches_a_visible_token() -> None:
    table = byte_table()
    assert context_ids(table, [0x61] + [256] * 50, True) == [0x61]
    assert context_ids(table, [0x61] + [0x80] * 50, True) == [0x80] * 3
    assert context_ids(table, [256] * 3, True) == []


def test_max_chars_cuts_the_new_text_only() -> None:
    assert decode_chunk(byte_table(), list(b"abcdef"), 2, 3, True, True) == "cde"


@pytest.mark.parametrize(
    ("ids", "num_emitted", "max_chars"), [([1], 2, -1), ([1], -1, -1), ([1], 0, -2), ([-1], 0, -1)]
)
def test_impossible_windows_are_refused(ids: list[int], num_emitted: int, max_chars: int) -> None:
    with pytest.raises(InvalidRequestError):
        decode_chunk(byte_table(), ids, num_emitted, max_chars, False, True)
