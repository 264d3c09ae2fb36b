from __future__ import annotations

import re

import pytest

from helpers.doc_names import ROOT
from naiad.triton_server.request_fields import NOT_SERVED

MODELS = ("ensemble", "tokenizer", "llm", "detokenizer")
# The tokenizer's names of refused fields that the text level calls otherwise.
TOKENIZER_REFUSED = {
    *("DECODER_QUERY", "PROMPT_TABLE_EXTRA_ID", "IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "IMAGES"),
}

_ROW = re.compile(r"^\| `(\w+)` \| (\w+\[[^\]]*\]) \| ([a-z ]+) \|", re.MULTILINE)
_TENSOR = re.compile(r'name: "(\w+)", data_type: TYPE_(\w+), dims: (\[[^\]]*\])')


def page_rows(model: str) -> list[tuple[str, str, str]]:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    section = re.search(rf"^## `{model}`.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    return _ROW.findall(section.group())


def declared(model: str) -> list[tuple[str, str]]:
    text = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    return [(name, kind + dims) for name, kind, dims in _TENSOR.findall(text)]


def declared_inputs(model: str) -> set[str]:
    text = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    return {name for name, _, _ in _TENSOR.findall(text.partition("output [")[0])}


@pytest.mark.parametrize("model", MODELS)
def test_every_declared_tensor_has_its_row(model: str) -> None:
    assert [(name, kind) for name, kind, _ in page_rows(model)] == declared(model)


@pytest.mark.parametrize("model", ["ensemble", "tokenizer", "llm"])
def test_an_input_is_called_refused_exactly_when_it_is(model: str) -> None:
    refused = {name for name, _, status in page_rows(model) if status == "refused"}
    not_served = TOKENIZER_REFUSED if model == "tokenizer" else set(NOT_SERVED)

    assert refused == not_served & declared_inputs(model)
