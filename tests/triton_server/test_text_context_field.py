from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.triton_server_doubles import LIMITS, llm_source
from naiad.errors import InvalidRequestError
from naiad.frontend.request import GenerateRequest, RequestRow
from naiad.tokenization import pack_word_list
from naiad.triton_server.requests.llm import read_request


def context_bytes(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def read_row(**tensors: Any) -> RequestRow:
    request = read_request(llm_source(**tensors), LIMITS)
    assert isinstance(request, GenerateRequest)
    return request.rows[0]


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (b"nonsense", "text_context is not what Naiad's tokenizer model writes"),
        (b'{"stop_strings": [""]}', "text_context: stop_strings has an entry of 0 bytes"),
        (context_bytes(stop_strings=["x" * 257]), "text_context: stop_strings has an entry of 257 bytes"),
        (context_bytes(stop_strings=["x"] * 65), "text_context: stop_strings has 65 entries"),
        (context_bytes(prompt_tail_ids=[1] * 17), "text_context: prompt_tail_ids has 17 ids"),
        (context_bytes(prompt_tail_ids=[1000]), "text_context: prompt_tail_ids holds 1000"),
        (context_bytes(prompt_tail_ids=[-1]), "text_context: prompt_tail_ids holds -1"),
        (context_bytes(num_prompt_chars=-1), "text_context: num_prompt_chars = -1"),
        (context_bytes(num_prompt_chars=2**62), "text_context: num_prompt_chars"),
        (context_bytes(num_prompt_chars=2**70), "text_context"),
    ],
)
def test_bad_context_is_refused_by_field_and_value(sent: bytes, named: str) -> None:
    with pytest.raises(InvalidRequestError, match="^" + named):
        read_row(text_context=sent)


def test_it_replaces_packed_stop_words() -> None:
    context = context_bytes(stop_strings=["a"], prompt_tail_ids=[5])
    row = read_row(text_context=context, stop_words_list=pack_word_list([[7]])[None])
    assert row.text is not None
    assert row.text.stop_strings == ("a",)
    assert row.params.stop_sequences == ()


def test_stop_strings_are_part_of_the_text_when_asked_for() -> None:
    context = context_bytes(stop_strings=["a"])
    for sent in (True, False):
        row = read_row(text_context=context, include_stop_str_in_output=sent)
        assert row.text is not None
        assert row.text.includes_stop_string is sent
    assert read_row(include_stop_str_in_output=True).text is None
