from __future__ import annotations

import re

import pytest

from helpers.doc_names import ROOT
from naiad.cli.presets import PRESETS, shipped_model
from naiad.triton_server.unserved_fields import NOT_SERVED

MODELS = ("ensemble", "tokenizer", "llm", "detokenizer", "vllm_model")
# Refused fields that the text level calls otherwise.
OTHER_NAMES = {
    "tokenizer": {
        *("DECODER_QUERY", "PROMPT_TABLE_EXTRA_ID", "IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "IMAGES"),
    },
    "vllm_model": {"image", "embedding_request"},
}

_ROW = re.compile(r"^\| `(\w+)` \| (\w+\[[^\]]*\]) \| ([a-z ]+) \|", re.MULTILINE)
_TENSOR = re.compile(r'name: "(\w+)", data_type: TYPE_(\w+), dims: (\[[^\]]*\])')


def page_rows(model: str) -> list[tuple[str, str, str]]:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    section = re.search(rf"^## `{model}`.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    return _ROW.findall(section.group())


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
    assert [(name, kind) for name, kind, _ in page_rows(model)] == declared(model)


def test_text_has_the_ensembles_tensors_and_its_own_rows() -> None:
    shared, text = declared("ensemble"), declared("text")
    assert [(name, kind) for name, kind, _ in page_rows("text")] == [
        each for each in text if each not in shared
    ]
    assert [each for each in text if each in shared] == shared


@pytest.mark.parametrize("model", ["ensemble", "tokenizer", "llm", "text", "vllm_model"])
def test_an_input_is_called_refused_exactly_when_it_is(model: str) -> None:
    refused = {name for name, _, status in page_rows(model) if status == "refused"}
    not_served = OTHER_NAMES.get(model, set(NOT_SERVED))
    shown = {name for name, _, _ in page_rows(model)}

    assert refused == not_served & declared_inputs(model) & shown
