"""The table of fields is sound, and each row's values are checked by it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from naiad.frontend.field import ABSENT, Arrival, Field, FieldError, Frontend, Kind
from naiad.frontend.fields import FIELD, FIELDS, fields_at, known_parameters
from naiad.sequence import SamplingParams


@pytest.mark.parametrize("frontend", Frontend)
def test_a_frontend_has_one_field_for_a_name(frontend: Frontend) -> None:
    names = Counter(name for field in FIELDS if (name := field.name_at(frontend)))
    assert [name for name, count in names.items() if count > 1] == []


def test_what_a_field_sets_is_there() -> None:
    attributes = {field.parameter_of_sampling for field in FIELDS} - {""}
    assert attributes - set(SamplingParams.__struct_fields__) == set()


def test_aliases_and_repeated_parameters_name_fields() -> None:
    assert {field.alias_of or field.repeats for field in FIELDS} - {""} <= FIELD.keys()


def test_a_parameter_has_the_text_levels_name() -> None:
    assert known_parameters(Frontend.LLM) == known_parameters(Frontend.TEXT)
    assert "top_k" in known_parameters(Frontend.LLM)
    assert "runtime_top_k" not in known_parameters(Frontend.LLM)


def test_lists_and_internal_tensors_are_no_parameters() -> None:
    names = known_parameters(Frontend.LLM).keys() & {"stop_token_ids", "input_lengths", "text_context"}
    assert names == set()


def test_keys_of_vllm_are_parameters_too() -> None:
    assert {"n", "best_of", "stream", "min_length"} <= known_parameters(Frontend.VLLM).keys()
    assert fields_at(Frontend.SAMPLING_PARAMETERS)["n"] is FIELD["num_return_sequences"]


FRACTION = Field("share", Kind.FP32, minimum=0.1, maximum=1)
COUNT = Field("count", Kind.INT32, minimum=0, maximum=5)
POSITIVE = Field("width", Kind.FP32, above=0)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (FRACTION, 0.5, 0.5),
        (FRACTION, 1, 1.0),
        (FRACTION, float(np.float32(0.1)), 0.1),
        (COUNT, 5, 5),
        (POSITIVE, 0.001, 0.001),
        (Field("flag", Kind.BOOL), True, True),
        (Field("salt", Kind.STRING, max_item_size=4), "éé", "éé"),
    ],
)
def test_a_value_within_the_bounds_is_taken(field: Field, value: Any, expected: Any) -> None:
    assert field.check(value) == expected
    assert type(field.check(value)) is type(expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (FRACTION, 0.0, "share = 0.0: expected a finite number ≥ 0.1 and ≤ 1"),
        (FRACTION, math.nan, "share = nan: expected a finite number"),
        (FRACTION, True, "share = True: expected a number"),
        (COUNT, 6, "count = 6: expected a finite number ≥ 0 and ≤ 5"),
        (COUNT, 1.0, "count = 1.0: expected a whole number"),
        (POSITIVE, 0.0, "width = 0.0: expected a finite number > 0"),
        (POSITIVE, math.inf, "width = inf: expected a finite number > 0"),
        (Field("flag", Kind.BOOL), 1, "flag = 1: expected true or false"),
        (Field("salt", Kind.STRING), 1, "salt = 1: expected a string"),
        (Field("salt", Kind.STRING, max_item_size=3), "éé", "salt has 4 bytes: at most 3 are allowed"),
        (Field("salt", Kind.STRING), "\ud800", "salt holds half a surrogate pair"),
    ],
)
def test_any_other_value_is_refused_by_name(field: Field, value: Any, message: str) -> None:
    with pytest.raises(FieldError) as raised:
        field.check(value)
    assert str(raised.value).startswith(message)


def test_an_error_can_name_the_field_as_its_client_does() -> None:
    with pytest.raises(FieldError) as raised:
        COUNT.check(6)
    assert str(raised.value.named("n")) == "n = 6: expected a finite number ≥ 0 and ≤ 5"


def test_entries_of_a_list_are_checked() -> None:
    ids = Field("ids", Kind.INT32, (-1,), max_items=2)
    with pytest.raises(FieldError, match="ids has 3 ids: at most 2 are allowed"):
        ids.check_count(3, "ids")
    with pytest.raises(FieldError, match=r"ids holds 7: expected token ids in \[0, 7\)"):
        ids.check_token_ids([1, 7, 8], 7)
    biases = Field("biases", Kind.FP32, (-1,), minimum=-10.0, maximum=10.0)
    with pytest.raises(FieldError, match=r"biases holds nan: expected finite numbers in \[-10.0, 10.0\]"):
        biases.check_numbers([1, math.nan])


@pytest.mark.parametrize(
    ("field", "value", "is_off"),
    [
        (Field("x", Kind.INT32, off_values=(0,)), np.array([[0]]), True),
        (Field("x", Kind.INT32, off_values=(0,)), np.array([[1]]), False),
        (Field("x", Kind.STRING), np.array([[b""]], dtype=object), True),
        (Field("x", Kind.STRING), np.array([[b"a"]], dtype=object), False),
        (Field("x", Kind.FP16, (-1, -1)), np.zeros((1, 0, 4)), True),
        (Field("x", Kind.INT32, (-1,), single_is_off=True), np.array([[7], [7]]), True),
        (Field("x", Kind.INT32, (-1,), single_is_off=True), np.array([[7, 7]]), False),
    ],
)
def test_a_field_that_is_not_served_may_ask_for_nothing(field: Field, value: Any, is_off: bool) -> None:
    assert field.asks_for_nothing(value) is is_off


def test_values_below_off_are_off_where_nothing_bounds_them() -> None:
    assert FIELD["top_p"].is_off(-1.0)
    assert not FIELD["top_p"].is_off(0.5)
    assert not FIELD["top_p_decay"].is_off(0.5)


def test_only_parameters_have_no_tensor() -> None:
    for field in FIELDS:
        if not any(field.name_at(frontend) for frontend in Frontend):
            assert field.arrival is Arrival.PARAMETER
            assert field.text == field.llm == ABSENT
