from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from helpers.tiny_tokenizers import KINDS, TEXTS, tiny_tokenizer, write_tokenizer
from naiad.openai_server.api.text_offsets import TextOffsets, prompt_offsets
from naiad.tokenization import Tokenizer, decode

EMOJI = "a😀é你"


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    return Tokenizer.from_directory(write_tokenizer(folder, tiny_tokenizer(request.param)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    return Tokenizer.from_directory(write_tokenizer(folder, tiny_tokenizer("byte_level")))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """A token for each byte."""
    table = tokenizer.table
    singles = {table.visible_bytes(token_id, False): token_id for token_id in range(len(table))}
    return [singles[bytes([byte])] for byte in data]


@pytest.mark.parametrize("text", ["The quick brown fox", "the stop", "stop", "the\n", "the  dog"])
def test_tokens_of_a_prompt_begin_where_their_text_is(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    places = prompt_offsets(tokenizer.table, ids, text)
    assert places == sorted(places)
    found = 0
    for token_id, place in zip(ids, places, strict=True):
        piece = tokenizer.table.visible_bytes(token_id, False).decode(errors="replace")
        if token_id not in tokenizer.table.special_ids:
            # The space that a tokenizer puts before the first word is not in the text.
            assert text.startswith((piece, piece.removeprefix(" ")) if place == 0 else piece, place)
            found += bool(piece)
    assert found > 0
    assert places[0] == 0


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_spaces_before_the_first_word_count(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, tiny_tokenizer(kind)))
    ids = tokenizer.encode("  the dog", add_special_tokens=True)
    places = prompt_offsets(tokenizer.table, ids, "  the dog")
    pieces = [tokenizer.table.visible_bytes(token_id, True).decode() for token_id in ids]
    letters = [place for place, piece in zip(places, pieces, strict=True) if piece.strip(" ") == "g"]
    assert letters == [8]


def test_special_tokens_that_are_in_the_text_take_their_place(byte_level: Tokenizer) -> None:
    text = "<s>The</s>!"
    ids = byte_level.encode(text, add_special_tokens=True)
    places = dict(zip(ids, prompt_offsets(byte_level.table, ids, text), strict=True))
    assert places[byte_level.encode("</s>", add_special_tokens=False)[0]] == 6
    first, *others = byte_level.encode("The", add_special_tokens=False)
    without = prompt_offsets(byte_level.table, [0, first, *others], "The")
    assert without[:2] == [0, 0]


def test_parts_of_a_character_begin_with_it(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, EMOJI.encode())
    expected = [0, 1, 1, 1, 1, 2, 2, 3, 3, 3]
    assert prompt_offsets(byte_level.table, ids, EMOJI) == expected
    offsets = TextOffsets(byte_level.table, [], skip_special_tokens=True, start=5)
    assert [place for token_id in ids for place in offsets.of([token_id])] == [5 + each for each in expected]


def test_a_character_that_is_never_completed_is_one(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, b"\xf0\x9f,\xe4b")
    text = decode(byte_level.table, ids, skip_special_tokens=False)
    assert text == "\ufffd,\ufffdb"
    assert prompt_offsets(byte_level.table, ids, text) == [0, 0, 1, 2, 3]
    offsets = TextOffsets(byte_level.table, [], skip_special_tokens=True, start=0)
    assert offsets.of(ids) == [0, 0, 1, 2, 3]


def test_a_character_may_begin_in_the_prompt(byte_level: Tokenizer) -> None:
    tail, rest = byte_ids(byte_level, "😀".encode())[:2], byte_ids(byte_level, "😀!".encode())[2:]
    offsets = TextOffsets(byte_level.table, tail, skip_special_tokens=True, start=3)
    assert offsets.of(rest) == [3, 3, 4]


def test_special_tokens_that_are_left_out_have_no_width(byte_level: Tokenizer) -> None:
    for skips, expected in ((True, [0, 1, 1]), (False, [0, 1, 5])):
        offsets = TextOffsets(byte_level.table, [], skip_special_tokens=skips, start=0)
        (end,) = byte_level.encode("</s>", add_special_tokens=False)
        a, b = byte_ids(byte_level, b"ab")
        assert offsets.of([a, end, b]) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_not_what_the_ids_say_bounds_the_places(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    for other in ("", text[::2], text.upper()):
        places = prompt_offsets(tokenizer.table, ids, other)
        assert len(places) == len(ids)
        assert all(left <= right for left, right in pairwise(places))
        assert max(places) <= len(other)
