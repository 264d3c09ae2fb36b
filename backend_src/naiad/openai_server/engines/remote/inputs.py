"""Turns a request into the tensors of a model that takes text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferInput

from naiad.frontend.field import Field, Frontend, Kind
from naiad.frontend.fields import FIELD
from naiad.frontend.prompt import PromptEncoder
from naiad.openai_server.api.constraints.grammar_errors import param_of
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.reading import AskedGeneration
from naiad.openai_server.engines.remote.shape import ModelShape
from naiad.sequence import GrammarKind, GrammarSpec
from naiad.tokenization import decode

_DTYPES: Mapping[Kind, Any] = {
    Kind.BOOL: np.bool_,
    Kind.INT32: np.int32,
    Kind.UINT64: np.uint64,
    Kind.FP32: np.float32,
}
# With its name the remote engine's errors about a grammar begin.
GUIDE_FIELD = "guided_decoding_guide"
_GUIDE_FIELDS = ("guided_decoding_guide_type", GUIDE_FIELD)
# Grammars that begin with the first token.
_GUIDE_TYPES: Mapping[GrammarKind, str] = {
    GrammarKind.JSON_OBJECT: "json",
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "ebnf_grammar",
}
_OPERATORS = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
# What every response has to say.
_WANTED = ("return_finish_reason", "return_num_output_tokens", "return_num_cached_tokens")


def check_owner(asked: AskedGeneration) -> None:
    """Refuse a salt of the client's own if the server has keys.

    A remote engine shares its time among salts, so a client with many salts would get many shares.

    Raises:
        APIError: the request has both.
    """
    if asked.text_form.fields.get("cache_salt") and asked.request.rows[0].tenant is not None:
        message = "cache_salt is not supported with keys in front of a remote server: do not send it."
        raise APIError(400, message, param="cache_salt", code="unsupported_value")


def row_inputs(asked: AskedGeneration, row: int, shape: ModelShape, encoder: PromptEncoder) -> list[Any]:
    """Return the `InferInput`s of one prompt.

    Args:
        asked: the request.
        row: the index of the prompt.
        shape: the model.
        encoder: the model's.

    Raises:
        APIError: the model has no such input, or no text stands for the prompt.
    """
    owned = asked.request.rows[row]
    fields = {**asked.text_form.fields, **_prompt(asked, row, shape, encoder)}
    # They come from the client's key, if there are keys.
    fields |= _guide(owned.params.grammar, shape)
    fields |= {"priority": owned.params.priority, "cache_salt": owned.cache_salt}
    fields |= {name: True for name in _WANTED if name in shape.inputs}
    return [
        _input(field, value, shape)
        for field, value in ((FIELD[name], value) for name, value in fields.items())
        if _is_sent(field, value, shape)
    ]


def _guide(grammar: GrammarSpec | None, shape: ModelShape) -> Mapping[str, str]:
    """The fields of a grammar.

    Raises:
        APIError: the remote model takes no such grammar.
    """
    if grammar is None:
        return {}
    kind, source = grammar.kind, grammar.source
    if kind is GrammarKind.CHOICE:
        kind, source = GrammarKind.REGEX, "|".join(map(_escaped, json.loads(source)))
    is_known = kind in _GUIDE_TYPES and not grammar.begins_after
    if not is_known or not shape.inputs.issuperset(_GUIDE_FIELDS):
        message = (
            f"{grammar.field}: the remote model {shape.name} can not enforce this: expected no format, "
            "or one that holds from the first token on (not behind what a model reasons, and not calls)."
        )
        raise APIError(400, message, param=param_of(grammar), code="unsupported_value")
    return dict(zip(_GUIDE_FIELDS, (_GUIDE_TYPES[kind], source), strict=True))


def _escaped(text: str) -> str:
    """The regular expression of a text."""
    return _OPERATORS.sub(r"\\\g<0>", text)


def _is_sent(field: Field, value: Any, shape: ModelShape) -> bool:
    """Whether a field has to be sent.

    Raises:
        APIError: it has, but the model has no such input.
    """
    if (field.name == "priority" and value == 0) or value in ("", []):
        return False
    if field.name_at(Frontend.TEXT) in shape.inputs:
        return True
    key = field.openai or field.name
    key = field.name if key == "=" else key
    message = f"{key} is not supported by the model {shape.name}: do not send it."
    raise APIError(400, message, param=key, code="unsupported_value")


def _input(field: Field, value: Any, shape: ModelShape) -> Any:
    values = value if isinstance(value, list) else [value]
    array: npt.NDArray[Any]
    if field.kind is Kind.STRING:
        array = np.array([each.encode() for each in values], dtype=np.object_)
    else:
        array = np.array(values, dtype=_DTYPES[field.kind])
    if shape.has_rows:
        array = array.reshape(1, -1)
    kind = "BYTES" if field.kind is Kind.STRING else field.kind.value
    tensor = InferInput(field.name_at(Frontend.TEXT), list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _prompt(asked: AskedGeneration, row: int, shape: ModelShape, encoder: PromptEncoder) -> Mapping[str, str]:
    """The field that says the prompt.

    Raises:
        APIError: the model would read every such text as other tokens.
    """
    form = asked.text_form
    plain = form.prompts[row]
    if plain is not None and all(name in shape.inputs for name in plain):
        return plain
    ids = asked.request.rows[row].prompt_token_ids
    text = decode(encoder.tokenizer.table, ids, skip_special_tokens=False)
    if text and encoder.tokenizer.encode(text, shape.adds_special_tokens) == ids:
        return {"text_input": text}
    message = (
        f"{form.prompt_name}: a remote server takes text, and would read no text as just the tokens of this "
        "prompt: expected a prompt as text, without options of its own for special tokens or its length."
    )
    raise APIError(400, message, param=form.prompt_name, code="unsupported_value")
