"""The shipped config.pbtxt files agree with the code: nothing declared is silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from naiad.config.engine_config import field_names
from naiad.frontend.field import Frontend
from naiad.frontend.fields import fields_at
from naiad.frontend.output_tensors import TOKENIZER_TENSORS

REPOSITORY = Path(__file__).parents[2] / "model_repository"
LLM = fields_at(Frontend.LLM)
SERVED = {name for name, field in LLM.items() if field.served}
MADE_BY_THE_TOKENIZER = {each.llm for each in TOKENIZER_TENSORS if each.llm}


def load(name: str) -> ModelConfig:
    return text_format.Parse((REPOSITORY / name / "config.pbtxt").read_text(), ModelConfig())


def test_every_input_of_llm_is_served_or_refused() -> None:
    declared = {each.name for each in load("llm").input}
    assert declared - LLM.keys() == set()


def test_every_served_tensor_is_declared() -> None:
    assert SERVED - {each.name for each in load("llm").input} == set()


def test_llm_parameters_are_the_engines_fields() -> None:
    others = {
        "exclude_input_in_output",
        "forwarded_headers",
        "otlp_endpoint",
        "record_file",
        "record_prompts",
    }
    assert set(load("llm").parameters) - others == set(field_names())


@pytest.mark.parametrize("name", ["llm", "detokenizer", "text"])
def test_streaming_models_are_decoupled_with_one_instance(name: str) -> None:
    config = load(name)
    assert config.model_transaction_policy.decoupled
    assert [group.count for group in config.instance_group] == [1]


@pytest.mark.parametrize("name", ["tokenizer", "llm", "detokenizer", "text"])
def test_model_py_is_two_lines(name: str) -> None:
    lines = (REPOSITORY / name / "1" / "model.py").read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("as TritonPythonModel")


def test_ensemble_maps_each_input_and_output_with_its_type() -> None:
    ensemble = load("ensemble")
    steps = {step.model_name: step for step in ensemble.ensemble_scheduling.step}
    types = {
        name: {each.name: (each.data_type, list(each.dims)) for each in load(name).input} for name in steps
    }
    used = {outer: (model, inner) for model, step in steps.items() for inner, outer in step.input_map.items()}
    for each in ensemble.input:
        model, inner = used[each.name]
        assert types[model][inner] == (each.data_type, list(each.dims)), each.name
    produced = set(steps["detokenizer"].output_map.values())
    assert {each.name for each in ensemble.output} == produced


def test_ensemble_hands_every_input_of_llm_and_the_detokenizer_on() -> None:
    ensemble = load("ensemble")
    steps = {step.model_name: step for step in ensemble.ensemble_scheduling.step}
    served = {name for name in SERVED if LLM[name].name_at(Frontend.ENSEMBLE)} | MADE_BY_THE_TOKENIZER
    assert served - set(steps["llm"].input_map) == set()
    assert {each.name for each in load("detokenizer").input} == set(steps["detokenizer"].input_map)
    assert {each.name for each in load("detokenizer").output} == set(steps["detokenizer"].output_map)
    made = {each.name for each in load("llm").output} - {"context_phase_params"}
    assert made == set(steps["llm"].output_map)


def test_text_has_the_ensembles_tensors_and_some_more() -> None:
    text, ensemble = load("text"), load("ensemble")
    assert list(text.input)[: len(ensemble.input)] == list(ensemble.input)
    assert list(text.output) == list(ensemble.output)
    more = {each.name for each in text.input} - {each.name for each in ensemble.input}
    refused = {name for name, field in fields_at(Frontend.TEXT).items() if not field.served}
    assert more - {"stop"} == more & refused
