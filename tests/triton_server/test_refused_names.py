"""Unknown parameters, and fields that are not served."""

from __future__ import annotations

import numpy as np
import pytest

from naiad.errors import InvalidRequestError
from naiad.frontend.field import FieldError, Frontend
from naiad.triton_server.requests.tensors import refuse_unknown_parameters, refuse_unserved


def test_an_unknown_parameter_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"unknown parameter 'tempreature': allowed are .*temperature"
    ):
        refuse_unknown_parameters({"tempreature": 1}, Frontend.TEXT, "")


def test_the_servers_own_and_forwarded_parameters_are_left_alone() -> None:
    parameters = {
        "id": "a",
        "sequence_id": 1,
        "triton_enable_empty_final_response": True,
        "timeout": 5,
        "x-tenant": "a",
        "lora_task_id": 0,
    }
    refuse_unknown_parameters(parameters, Frontend.LLM, "x-.*")


@pytest.mark.parametrize("name", ["triton_x", "triton_", "sequence_length"])
def test_names_that_only_begin_like_the_servers_own_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown parameter '{name}'"):
        refuse_unknown_parameters({name: 1}, Frontend.TEXT, "")


def test_each_frontend_has_parameters_of_its_own() -> None:
    refuse_unknown_parameters({"n": 2, "return_logprobs": True}, Frontend.VLLM, "")
    with pytest.raises(InvalidRequestError, match="unknown parameter 'n'"):
        refuse_unknown_parameters({"n": 2}, Frontend.TEXT, "")


def test_a_field_that_is_not_served_is_refused_by_name() -> None:
    refuse_unserved({"lora_task_id": np.array([[0]]), "use_draft_logits": False})
    with pytest.raises(FieldError, match="lora_task_id is not supported by this version of Naiad"):
        refuse_unserved({"lora_task_id": np.array([[7]])})
