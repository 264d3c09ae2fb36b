"""The invariant: whatever the pieces, they add up to the text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiny_tokenizers import KINDS, TEXTS, tiny_tokenizer, write_tokenizer
from naiad.sequence import TextContext
from naiad.tokenization import TextChunk, TextStream, Tokenizer, decode, decode_chunk


@lru_cache
def loaded(kind: str) -> tuple[Tokenizer, Any]:
    """Ours and that of transformers, from the same files."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), tiny_tokenizer(kind))
        return Tokenizer.from_directory(folder), AutoTokenizer.from_pretrained(folder)


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(ids[start : start + size])
        start += size
    return [*pieces, ids[start:]]


def streamed(
    tokenizer: Tokenizer, context: TextContext, pieces: list[list[int]], merges: list[bool]
) -> tuple[str, str | None]:
    """Text through pushes, merged chunks and the stateless detokenizer; and the stop string."""
    stream = TextStream(tokenizer.table, context)
    groups: list[list[TextChunk]] = []
    for index, piece in enumerate(pieces):
        chunk = stream.push(piece, index == len(pieces) - 1)
        if groups and index < len(merges) and merges[index]:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
        if chunk.is_cut:
            break
    text = ""
    for index, group in enumerate(groups):
        window = group[0].window_ids + [token_id for chunk in group for token_id in chunk.token_ids]
        is_cut = group[-1].is_cut
        num_chars = sum(chunk.num_chars for chunk in group)
        added = decode_chunk(
            tokenizer.table,
            window,
            len(group[0].window_ids),
            num_chars if is_cut else -1,
            index == len(groups) - 1,
            context.skip_special_tokens,
        )
        if context.stop_strings:
            assert len(added) == num_chars
        text += added
    return text, groups[-1][-1].stop_reason


def unstreamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    return decode_chunk(tokenizer.table, prompt + output, len(prompt), -1, True, skip)


def context_of(
    tokenizer: Tokenizer,
    prompt: list[int],
    skip: bool,
    stops: tuple[str, ...] = (),
    includes_stop: bool = False,
) -> TextContext:
    from naiad.tokenization import context_ids

    tail = tuple(context_ids(tokenizer.table, prompt, skip))
    return TextContext(
        stop_strings=stops,
        skip_special_tokens=skip,
        prompt_tail_ids=tail,
        includes_stop_string=includes_stop,
    )


def cut_at_first_stop(text: str, stops: tuple[str, ...], includes_stop: bool) -> tuple[str, str | None]:
    """The plain definition: the first end, and of these the longest string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if includes_stop else end - len(longest)], longest
    return text, None


@st.composite
def token_ids(draw: st.DrawFn, size: int) -> list[int]:
    """Ids of any kind, or those of real text with a few others between."""
    some = st.integers(0, size + 2)
    low = st.integers(0, min(size - 1, 300))
    return draw(st.lists(st.one_of(some, low), max_size=30))


cases = st.sampled_from(KINDS).flatmap(
    lambda kind: st.tuples(
        st.just(kind),
        token_ids(len(loaded(kind)[0].table)),
        token_ids(len(loaded(kind)[0].table)),
        st.booleans(),
        st.lists(st.integers(0, 5), max_size=12),
        st.lists(st.booleans(), max_size=13),
    )
)


@settings(max_examples=600, deadline=None)
@given(cases)
def test_pieces_add_up_to_the_unstreamed_text(case: Any) -> None:
    kind, prompt, output, skip, sizes, merges = case
    tokenizer, _ = loaded(kind)
    text, _ = streamed(tokenizer, context_of(tokenizer, prompt, skip), split(output, sizes), merges)
    assert text == unstreamed(tokenizer, prompt, output, skip)


@settings(max_examples=600, deadline=None)
@given(cases, st.data())
def test_stop_strings_cut_the_same_text_under_every_chunking(case: Any, data: st.DataObject) -> None:
    kind, prompt, output, skip, sizes, merges = case
    tokenizer, _ = loaded(kind)
    whole = unstreamed(tokenizer, prompt, output, skip)
    pieces = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda start: st.integers(1, 6).map(lambda size: whole[start : start + size] or "x")
    )
    stops = tuple(
        data.draw(
            st.lists(st.one_of(pieces, st.sampled_from(["zz", "\ufffd", " a"])), min_size=1, max_size=4)
        )
    )
    includes_stop = data.draw(st.booleans())
    context = context_of(tokenizer, prompt, skip, stops, includes_stop)
    expected = cut_at_first_stop(whole, stops, includes_stop)
    assert streamed(tokenizer, context, split(output, sizes), merges) == expected


@settings(max_examples=400, deadline=None)
@given(cases)
def test_prompt_text_and_output_text_are_the_whole_text(case: Any) -> None:
    kind, prompt, output, skip, _, _ = case
    tokenizer, _ = loaded(kind)
    before = decode_chunk(tokenizer.table, prompt, 0, -1, False, skip)
    whole = decode(tokenizer.table, prompt + output, skip)
    assert before + unstreamed(tokenizer, prompt, output, skip) == whole


@settings(max_examples=400, deadline=None)
@given(cases)
def test_decode_equals_transformers(case: Any) -> None:
    kind, prompt, output, skip, _, _ = case
    tokenizer, reference = loaded(kind)
    ids = prompt + output
    ours = decode(tokenizer.table, ids, skip)
    if kind.startswith("sentence_piece") and "\ufffd" in ours:
        return  # an invalid byte spoils its whole run there, and only itself here
    assert ours == reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_equals_transformers_token_by_token(kind: str, text: str) -> None:
    tokenizer, reference = loaded(kind)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == reference(text)["input_ids"]
    for num_prompt in (0, 1, 2, len(ids) // 2):
        context = context_of(tokenizer, ids[:num_prompt], True)
        added, _ = streamed(tokenizer, context, [[token_id] for token_id in ids[num_prompt:]] or [[]], [])
        before = decode_chunk(tokenizer.table, ids[:num_prompt], 0, -1, False, True)
        assert before + added == reference.decode(ids, skip_special_tokens=True)


def test_an_invalid_byte_in_a_byte_fallback_run_spoils_only_itself() -> None:
    tokenizer, reference = loaded("sentence_piece")
    ids = [5 + byte for byte in (0xE4, 0xBD, 0xA0, 0xFF)]
    assert decode(tokenizer.table, ids, True) == "你\ufffd"
    assert reference.decode(ids) == "\ufffd" * 4
