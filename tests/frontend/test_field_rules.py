"""Rules between fields: aliases, beam searches, unknown and unserved names."""

from __future__ import annotations

import numpy as np
import pytest

from naiad.errors import InvalidRequestError
from naiad.frontend.field import FieldError, Frontend, Scalar
from naiad.frontend.field_rules import (
    check_beams,
    merge_aliases,
    refuse_unknown_parameters,
    refuse_unserved,
    required,
)


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


def test_an_unknown_parameter_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"unknown parameter 'tempreature': allowed are .*temperature"
    ):
        refuse_unknown_parameters({"tempreature": 1}, Frontend.TEXT, "")


def test_the_servers_own_and_forwarded_parameters_are_left_alone() -> None:
    parameters = {
        "id": "a",
        "sequence_id": 1,
        "triton_x": 1,
        "timeout": 5,
        "x-tenant": "a",
        "lora_task_id": 0,
    }
    refuse_unknown_parameters(parameters, Frontend.LLM, "x-.*")


def test_each_frontend_has_parameters_of_its_own() -> None:
    refuse_unknown_parameters({"n": 2, "return_logprobs": True}, Frontend.VLLM, "")
    with pytest.raises(InvalidRequestError, match="unknown parameter 'n'"):
        refuse_unknown_parameters({"n": 2}, Frontend.TEXT, "")


def test_a_field_that_is_not_served_is_refused_by_name() -> None:
    refuse_unserved({"lora_task_id": np.array([[0]]), "use_draft_logits": False})
    with pytest.raises(FieldError, match="lora_task_id is not supported by this version of Naiad"):
        refuse_unserved({"lora_task_id": np.array([[7]])})
