from __future__ import annotations

import re

import pytest

from helpers.contract_page import page_rows
from naiad.cli.repository.presets import PRESETS, shipped_model
from naiad.frontend.field import Frontend
from naiad.frontend.fields import fields_at

MODELS = ("ensemble", "tokenizer", "llm", "detokenizer", "vllm_model")
_TENSOR = re.compile(r'name: "(\w+)", data_type: TYPE_(\w+), dims: (\[[^\]]*\])')


def shown(model: str) -> list[tuple[str, str]]:
    return [(row.name, row.kind + row.dims) for row in page_rows(model)]


def declared(model: str) -> list[tuple[str, str]]:
    return [(name, kind + dims) for name, kind, dims in _TENSOR.findall(config_text(model))]


def config_text(model: str) -> str:
    names = {name: shipped for names in PRESETS.values() for shipped, name in names.items()}
    return (shipped_model(names[model]) / "config.pbtxt").read_text()


def declared_inputs(model: str) -> set[str]:
    text = config_text(model)
    return {name for name, _, _ in _TENSOR.findall(text.partition("output [")[0])}


@pytest.mark.parametrize("model", MODELS)
def test_every_declared_tensor_has_its_row(model: str) -> None:
    assert shown(model) == declared(model)


def test_text_has_the_ensembles_tensors_and_its_own_rows() -> None:
    shared, text = declared("ensemble"), declared("text")
    assert shown("text") == [each for each in text if each not in shared]
    assert [each for each in text if each in shared] == shared


@pytest.mark.parametrize("model", ["ensemble", "tokenizer", "llm", "text", "vllm_model"])
def test_an_input_is_called_refused_exactly_when_it_is(model: str) -> None:
    refused = {row.name for row in page_rows(model) if row.status == "refused"}
    frontend = Frontend("vllm" if model == "vllm_model" else model)
    not_served = {name for name, field in fields_at(frontend).items() if not field.served}

    assert refused == not_served & declared_inputs(model) & {row.name for row in page_rows(model)}
