"""The shipped config.pbtxt files agree with the code: nothing declared is silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from naiad.config.engine_config import field_names
from naiad.triton_server.requests.fields import NOT_SERVED, SERVED

REPOSITORY = Path(__file__).parents[2] / "model_repository"
RETENTION = {
    *(f"retention_token_range_{name}" for name in ("starts", "ends", "priorities", "durations_ms")),
    *("retention_decode_priority", "retention_decode_duration_ms"),
}
LLM_READS = RETENTION | {
    *("input_ids", "input_lengths", "text_context", "cache_salt", "stop_words_list", "stop_token_ids"),
    *("bad_words_list", "embedding_bias", "logit_bias_ids", "logit_bias_values", "allowed_token_ids"),
    "draft_input_ids",
}
LLM_SERVED = {field.tensor or field.name for field in SERVED}


def load(name: str) -> ModelConfig:
    return text_format.Parse((REPOSITORY / name / "config.pbtxt").read_text(), ModelConfig())


def test_every_input_of_llm_is_served_or_refused() -> None:
    declared = {each.name for each in load("llm").input}
    assert declared - LLM_SERVED - LLM_READS - set(NOT_SERVED) == set()


def test_every_served_tensor_is_declared() -> None:
    assert LLM_SERVED - {each.name for each in load("llm").input} == set()


def test_llm_parameters_are_the_engines_fields() -> None:
    assert set(load("llm").parameters) - {"exclude_input_in_output", "forwarded_headers"} == set(
        field_names()
    )


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
    """What only direct users of `llm` send has no name at the text level."""
    ensemble = load("ensemble")
    steps = {step.model_name: step for step in ensemble.ensemble_scheduling.step}
    served = (LLM_READS | LLM_SERVED) - {"stop", "draft_input_ids"} - RETENTION
    assert served - set(steps["llm"].input_map) == set()
    assert {each.name for each in load("detokenizer").input} == set(steps["detokenizer"].input_map)
    assert {each.name for each in load("detokenizer").output} == set(steps["detokenizer"].output_map)
    made = {each.name for each in load("llm").output} - {"context_phase_params"}
    assert made == set(steps["llm"].output_map)


def test_text_takes_and_gives_what_the_ensemble_does_and_what_only_it_can() -> None:
    text, ensemble = load("text"), load("ensemble")
    assert list(text.input)[: len(ensemble.input)] == list(ensemble.input)
    assert list(text.output) == list(ensemble.output)
    more = {each.name for each in text.input} - {each.name for each in ensemble.input}
    assert more - {"stop"} == more & set(NOT_SERVED)
