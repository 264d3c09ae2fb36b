"""Rules between fields: aliases, required ones, and beam searches."""

from __future__ import annotations

from typing import Any

import pytest

from naiad.frontend.field import FieldError, Scalar, shown
from naiad.frontend.request import check_beams, merge_aliases, required


def test_an_alias_is_read_as_its_field() -> None:
    assert merge_aliases({"min_length": 3, "seed": 1}) == {"min_tokens": 3, "seed": 1}
    assert merge_aliases({"min_length": 3, "min_tokens": 3}) == {"min_tokens": 3}


def test_a_field_and_its_alias_must_agree() -> None:
    with pytest.raises(FieldError, match="seed = 1 and random_seed = 2: expected one of them, or the same"):
        merge_aliases({"seed": 1, "random_seed": 2})


def test_a_required_field_is_named() -> None:
    assert required({"max_tokens": 3}, "max_tokens") == 3
    with pytest.raises(FieldError, match="max_tokens is missing: it is required"):
        required({}, "max_tokens")


@pytest.mark.parametrize(
    "values",
    [
        {"beam_width": 2, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "stream": False},
        {"beam_width": 2, "top_p": -1.0, "num_return_sequences": 2, "early_stopping": False},
        {"length_penalty": 1.0, "early_stopping": False, "temperature": 0.7, "top_p": 0.5},
    ],
)
def test_what_goes_with_a_search_or_without_one_is_taken(values: dict[str, Scalar]) -> None:
    check_beams(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"beam_width": 2, "stream": True},
            "stream = True is not supported with beam_width = 2: do not send",
        ),
        (
            {"beam_width": 2, "top_p": 0.5},
            "top_p = 0.5: expected 1.0 or at most 0.0 with beam_width = 2, as no",
        ),
        (
            {"beam_width": 2, "top_k": 5},
            "top_k = 5: expected 0 or 1 with beam_width = 2, as nothing is drawn",
        ),
        ({"beam_width": 2, "top_p_decay": 0.5}, "top_p_decay = 0.5: expected 1.0 with beam_width = 2"),
        ({"beam_width": 2, "num_return_sequences": 3}, "num_return_sequences = 3: expected at most 2 with"),
        ({"length_penalty": 0.5}, "length_penalty = 0.5: expected 0.0 or 1.0 without beams (beam_width > 1)"),
        ({"early_stopping": True}, "early_stopping = True: expected False without beams (beam_width > 1)"),
    ],
)
def test_what_does_not_is_refused(values: dict[str, Scalar], message: str) -> None:
    with pytest.raises(FieldError) as raised:
        check_beams(values)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 1e300, "text", "it's", b"bytes", [], [1, "a", [2.5]], {}, {"a": {"b": [1]}, "c": None}],
)
def test_a_short_value_is_shown_as_it_is(value: Any) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 1000, [1] * 1000, {str(n): n for n in range(1000)}, [["a" * 100]]])
def test_a_long_value_is_shortened(value: Any) -> None:
    assert shown(value) == repr(value)[:80]


def test_no_value_is_too_deep_to_be_shown() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[" * 80
