"""Checks every line of the compatibility page's tables on a real server."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from helpers.contract_models import INTERNAL, MESSAGES, MODELS, PAIRED, VALUES, Messages, Model
from helpers.contract_page import Row
from helpers.doc_names import ROOT
from helpers.raw_grpc import Outcome, ask
from helpers.server import Server
from naiad.frontend.field import Frontend
from naiad.frontend.fields import FIELDS, fields_at

# The names of the tokenizer's tensors in its error messages.
TEXT_NAMES = {field.name_at(Frontend.TOKENIZER): field.name for field in FIELDS if field.text}
# `llm` takes parameters by the names of the text level.
LLM_TEXT_NAMES = {field.name_at(Frontend.LLM): field.name for field in FIELDS if field.text}
# Inputs that need several responses.
REFUSED_UNARY = dict.fromkeys(("stream", "streaming"), "Streaming is only supported in decoupled mode.")


def cases(status: str) -> list[Any]:
    return [
        pytest.param(model, row, id=f"{model.name}-{row.name}")
        for model in MODELS
        for row in model.inputs
        if row.status == status and row.name not in INTERNAL | PAIRED
    ]


def by_grpc(server: Server, model: Model, more: dict[str, Any]) -> Outcome:
    outcome = ask(server.grpc, model.name, model.tensors(model.base() | more))
    assert outcome.num_finals == 1
    return outcome


def by_http(server: Server, model: Model, values: dict[str, Any]) -> tuple[int, str]:
    """Send values as JSON, which has no multidimensional tensors: a list is a row."""
    arrays = model.tensors(model.base() | values)
    body = {name: [_json(item) for item in array.reshape(-1).tolist()] for name, array in arrays.items()}
    return server.post(f"/v2/models/{model.name}/generate_stream", body)


def _json(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def asks_by_http(model: Model, values: dict[str, Any]) -> bool:
    """Whether to use HTTP: each line goes to one model by gRPC and, if possible, to another by HTTP."""
    fits = all(array.ndim == 1 + model.has_rows for array in model.tensors(values).values())
    return fits and (model.name == "text" or not model.is_decoupled)


@pytest.mark.parametrize(("model", "row"), cases("refused"))
def test_an_input_listed_as_refused_is_refused_by_name(presets: Server, model: Model, row: Row) -> None:
    values = {row.name: row.filled(model.has_rows)}
    expected = f"{TEXT_NAMES.get(row.name, row.name)} is not supported"
    if asks_by_http(model, values):
        status, text = by_http(presets, model, values)
        assert status == 400
        assert expected in text
    else:
        outcome = by_grpc(presets, model, values)
        assert [expected in error for error in outcome.errors] == [True]
        assert outcome.responses == []


@pytest.mark.parametrize(
    ("model", "row"), [case for case in cases("refused") if "means off" in case.values[1].note]
)
def test_the_value_that_means_off_is_accepted(presets: Server, model: Model, row: Row) -> None:
    value = np.zeros_like(row.filled(model.has_rows))
    assert by_grpc(presets, model, {row.name: value}).errors == []


@pytest.mark.parametrize(("model", "row"), cases("served"))
def test_an_input_listed_as_served_is_accepted(presets: Server, model: Model, row: Row) -> None:
    values = VALUES.get(row.name, {row.name: 1})
    if row.name == "messages":
        model = Messages(model.name, model.section, model.is_decoupled)
    error = REFUSED_UNARY.get(row.name, "") if not model.is_decoupled else ""
    if asks_by_http(model, values):
        status, text = by_http(presets, model, values)
        assert status == (400 if error else 200), text
        assert error in text
    else:
        outcome = by_grpc(presets, model, values)
        assert [error in each for each in outcome.errors] == [True] * bool(error)
        assert bool(outcome.responses) == (not error)


def requested_outputs(model: Model) -> dict[str, Any]:
    return {
        row.name: True for row in model.inputs if row.name.startswith("return_") and row.status == "served"
    }


# Outputs that only some requests have → the fields that request them.
OCCASIONS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("sequence_index",), {"num_return_sequences": 2}),
    (("top_log_prob_ids", "top_log_probs"), {"num_log_probs": 2}),
]


def sent(server: Server, model: Model, more: dict[str, Any]) -> dict[str, Any]:
    """Output → its dtype, over all responses."""
    outcome = by_grpc(server, model, more)
    assert outcome.errors == []
    return {name: array.dtype for response in outcome.responses for name, array in response.items()}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_outputs_have_the_types_of_the_page_and_come_when_asked_for(presets: Server, model: Model) -> None:
    rows = {row.name: row for row in model.rows if row.is_output and row.status == "served"}
    occasional = {name: more for names, more in OCCASIONS for name in names if name in rows}
    requested = requested_outputs(model)
    found = sent(presets, model, requested)
    assert {name: rows[name].dtype for name in found} == found
    internal = {name for name, row in rows.items() if row.note.startswith("internal")}
    always = rows.keys() - occasional.keys() - internal - {"batch_index"}
    assert always - found.keys() == set()
    if model.section == "llm":
        assert not internal & found.keys()
    if model.section not in ("tokenizer", "vllm_model"):
        plain = sent(presets, model, {})
        assert plain.keys() == {"llm": {"output_ids", "sequence_length"}}.get(model.section, {"text_output"})
    for name, more in occasional.items():
        if model.is_decoupled or name != "sequence_index":
            assert sent(presets, model, more)[name] == rows[name].dtype


@pytest.mark.parametrize(
    "model", [model for model in MODELS if model.section != "ensemble"], ids=lambda model: model.name
)
def test_outputs_come_in_the_order_of_the_configuration(presets: Server, model: Model) -> None:
    """TensorRT-LLM's benchmark reads the first output by position; an ensemble's order is not fixed."""
    with triton.InferenceServerClient(presets.grpc) as client:
        declared = [each.name for each in client.get_model_config(model.name).config.output]
    more = requested_outputs(model) | (
        {"num_log_probs": 2} if "num_log_probs" in {row.name for row in model.inputs} else {}
    )
    responses = by_grpc(presets, model, more).responses
    assert responses
    for response in responses:
        assert list(response) == [name for name in declared if name in response]


GREEDY_OR_NOT = {
    "absent": ({}, True),
    "sent as 1": ({"temperature": 1.0}, True),
    "filters off": ({"temperature": 1.0, "top_k": 0, "top_p": 0.0}, True),
    "zero": ({"temperature": 0.0, "top_p": 1.0}, True),
    "one candidate": ({"temperature": 5.0, "top_k": 1}, True),
    "another temperature": ({"temperature": 5.0}, False),
    "top_p sent as 1": ({"temperature": 1.0, "top_p": 1.0}, False),
    "top_k": ({"top_k": 300}, False),
}


@pytest.mark.parametrize("case", GREEDY_OR_NOT)
@pytest.mark.parametrize("model", [MODELS[0], MODELS[2], MODELS[3], MODELS[5]], ids=lambda model: model.name)
def test_what_is_greedy(presets: Server, model: Model, case: str) -> None:
    fields, is_greedy = GREEDY_OR_NOT[case]
    names = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "max_tokens": "request_output_len"}
    texts = []
    for seed in (1, 2):
        values = {"max_tokens": 20, "ignore_eos": True, "seed": seed, **fields}
        if model.section == "llm":
            values = {names.get(name, name): value for name, value in values.items()}
        outcome = by_grpc(presets, model, values)
        texts.append((outcome.errors, outcome.token_ids if model.section == "llm" else outcome.text))
    assert (texts[0] == texts[1]) == is_greedy


@pytest.mark.parametrize("model", [MODELS[0], MODELS[3], MODELS[5]], ids=lambda model: model.name)
def test_text_or_messages_but_not_both(presets: Server, model: Model) -> None:
    both = ask(presets.grpc, model.name, model.tensors(model.base() | {"messages": MESSAGES}))
    neither = ask(presets.grpc, model.name, model.tensors({"max_tokens": 4}))
    for outcome in (both, neither):
        assert outcome.num_finals == 1
        (error,) = outcome.errors
        assert "text_input" in error
        assert "messages" in error


@pytest.mark.parametrize("model", ["ensemble", "llm", "text"])
def test_a_tensor_wins_over_a_parameter_and_the_servers_own_are_passed_over(
    presets: Server, model: str
) -> None:
    asked = next(each for each in MODELS if each.name == model)
    own = {"sequence_start": True, "sequence_end": True}
    seeded = asked.tensors(asked.base() | {"seed": 3, "temperature": 5.0})
    plain = ask(presets.grpc, model, seeded)
    answer = ask(presets.grpc, model, seeded, parameters={"temperature": 0.1, "seed": 4, **own})
    assert answer.errors == []
    assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text)
    refused = ask(presets.grpc, model, seeded, parameters={"surprise": 4})
    assert ["surprise" in error for error in refused.errors] == [True]


@pytest.mark.parametrize("model", ["llm", "text", "unary_tensorrt_llm", "unary_tensorrt_llm_bls"])
def test_a_stop_needs_a_request_id(presets: Server, model: str) -> None:
    asked = next(each for each in MODELS if each.name == model)
    outcome = ask(presets.grpc, model, asked.tensors(asked.base() | {"stop": True}))
    assert outcome.num_finals == 1
    assert outcome.errors == ["A request id must be provided for request cancellation"]


def test_refusals_of_unary_models_carry_their_status(presets: Server) -> None:
    tensor = triton.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"Hello"]], dtype=np.object_))
    client = triton.InferenceServerClient(presets.grpc)
    with pytest.raises(InferenceServerException, match="max_tokens is missing") as raised:
        client.infer("unary_tensorrt_llm_bls", [tensor])
    client.close()
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


def scalar_cases() -> list[Any]:
    """Fields that have a single value and a text-level name, which may be parameters instead of tensors."""
    models = {"ensemble", "llm", "vllm_model"}
    return [
        case
        for case in cases("served")
        if case.values[0].name in models and case.values[1].dims == "[1]" and not is_tensor(*case.values)
    ]


def is_tensor(model: Model, row: Row) -> bool:
    return row.name.startswith("retention_") or row.name == "sampling_parameters" or row.name in model.base()


@pytest.mark.parametrize(("model", "row"), scalar_cases())
def test_a_scalar_may_be_a_parameter(presets: Server, model: Model, row: Row) -> None:
    values = dict(VALUES.get(row.name, {row.name: 1}))
    if row.name == "messages":
        model = Messages(model.name, model.section)
    kinds: dict[str, Any] = {"BOOL": bool, "FP32": float, "STRING": str}
    parameters = {LLM_TEXT_NAMES.get(row.name, row.name): kinds.get(row.kind, int)(values.pop(row.name))}
    outcome = ask(presets.grpc, model.name, model.tensors(model.base() | values), parameters=parameters)
    assert (outcome.errors, outcome.num_finals) == ([], 1)


VLLM_VALUES: dict[str, Any] = {
    **{"n": 2, "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1},
    **{"seed": -1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    **{"stop": ["e"], "stop_token_ids": [5], "bad_words": ["e"], "allowed_token_ids": [5, 6]},
    **{"logit_bias": {"5": 1.5}, "include_stop_str_in_output": True, "ignore_eos": True, "logprobs": 2},
    **{"priority": 1, "num_draft_tokens": 1},
    **{"structured_outputs": {"regex": "[a-z ]+"}, "guided_decoding": {"choice": ["a", "b"]}},
}
SERVED_BY_VLLM = {
    key: VLLM_VALUES.get(key, 1)
    for key, field in fields_at(Frontend.SAMPLING_PARAMETERS).items()
    if field.served and key != "best_of"
}
REFUSED_BY_VLLM: dict[str, Any] = {
    **{"best_of": 3, "prompt_logprobs": 1, "detokenize": False, "skip_special_tokens": False},
    **{"spaces_between_special_tokens": False, "truncate_prompt_tokens": 5},
    **{"lora_name": "alpaca", "use_beam_search": True},
    **{"length_penalty": 0.5, "early_stopping": True, "logits_processors": ["x"], "extra_args": {"a": 1}},
    "flat_logprobs": True,
}


def ask_vllm(server: Server, sampling: dict[str, Any]) -> Outcome:
    outcome = by_grpc(server, MODELS[4], {"sampling_parameters": json.dumps(sampling)})
    assert outcome.num_finals == 1
    return outcome


def test_the_page_names_every_sampling_parameter() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    table = page.partition("| key | value | | note |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (served|refused) \|", table, re.MULTILINE)
    keys = {key for key, _ in rows}
    assert keys == SERVED_BY_VLLM.keys() | REFUSED_BY_VLLM.keys()
    # `best_of` is served only if it equals `n`.
    assert {key for key, status in rows if status == "served"} == SERVED_BY_VLLM.keys() | {"best_of"}


@pytest.mark.parametrize("key", SERVED_BY_VLLM)
def test_a_sampling_parameter_may_be_a_string(presets: Server, key: str) -> None:
    value = SERVED_BY_VLLM[key]
    assert ask_vllm(presets, {key: value}).errors == []
    if not isinstance(value, list | dict):
        assert ask_vllm(presets, {key: str(value)}).errors == []


@pytest.mark.parametrize("key", REFUSED_BY_VLLM)
def test_a_sampling_parameter_that_is_not_served_is_refused_by_name(presets: Server, key: str) -> None:
    (error,) = ask_vllm(presets, {key: REFUSED_BY_VLLM[key]}).errors
    assert error.startswith("Error generating stream: ")
    assert key in error
