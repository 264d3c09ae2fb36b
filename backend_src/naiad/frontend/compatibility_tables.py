"""Generates the tables of `docs/compatibility.md` from the tables of fields and outputs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from naiad.frontend.field import INT32_MAX, UINT64_MAX, Field, Frontend, Kind
from naiad.frontend.fields import fields_at
from naiad.frontend.model_configs import inputs_of
from naiad.frontend.output_tensors import (
    TOKENIZER_TENSORS,
    VLLM_TENSORS,
    OutputTensor,
    Path,
    detokenizer_inputs,
    llm_tensors,
    text_tensors,
)

# Section of the page → name of the shipped model that it describes.
SECTIONS = {
    "ensemble": "ensemble",
    "tokenizer": "tokenizer",
    "llm": "llm",
    "detokenizer": "detokenizer",
    "text": "text",
    "vllm_model": "vllm",
}
_NO_BOUNDS = (math.inf, -math.inf, INT32_MAX, UINT64_MAX)
_KEY_VALUES = {
    Kind.BOOL: "true or false",
    Kind.FP32: "number",
    Kind.INT32: "whole number",
    Kind.UINT64: "whole number",
    Kind.STRING: "text",
}


def with_tables(page: str) -> str:
    """Return the page with all of its tables regenerated.

    Raises:
        ValueError: the page lacks a table.
    """
    for section, model in SECTIONS.items():
        page = _with_table(page, section, "| input | type | | note |", _input_rows(model))
        if model != "text":
            page = _with_table(page, section, "| output | type | | note |", _output_rows(model))
    return _with_table(page, "vllm_model", "| key | value | | note |", _key_rows())


def _with_table(page: str, section: str, header: str, rows: Iterable[str]) -> str:
    """Replace the rows below the header in this section."""
    table = re.compile(
        rf"(^## `{section}`(?:(?!^## ).)*?^{re.escape(header)}\n\|[-|]+\n)(?:\|[^\n]*\n)*",
        re.MULTILINE | re.DOTALL,
    )
    written, count = table.subn(lambda found: found[1] + "".join(f"{row}\n" for row in rows), page)
    if count != 1:
        raise ValueError(f"expected one table {header!r} in the section `{section}`, found {count}")
    return written


def _input_rows(model: str) -> list[str]:
    if model == "detokenizer":
        return [
            _row(each.detokenizer_name, each.kind, each.dims, _status_in_detokenizer(each), _internal(each))
            for each in detokenizer_inputs()
        ]
    frontend = Frontend(model)
    shared = inputs_of("ensemble") if frontend is Frontend.TEXT else {}
    return [
        _row(name, field.kind, field.dims, "served" if field.served else "refused", note(field, frontend))
        for name, field in inputs_of(model).items()
        if name not in shared
    ]


def _output_rows(model: str) -> list[str]:
    if model == "tokenizer":
        return [
            _row(each.name, each.kind, each.dims, "served" if each.is_sent else "never sent", each.note)
            for each in TOKENIZER_TENSORS
        ]
    if model == "detokenizer":
        return [
            _row(
                each.detokenizer_name,
                each.kind,
                each.dims,
                "served" if each.path is Path.FROM_DETOKENIZER else "passed on",
                "the texts of all rows and beams, without a batch dimension"
                if each.path is Path.FROM_DETOKENIZER
                else "",
            )
            for each in text_tensors()
        ]
    own = {"llm": llm_tensors(), "vllm": VLLM_TENSORS}.get(model, text_tensors())
    return [
        _row(
            each.name,
            each.kind,
            each.dims,
            "served" if each.is_sent else "never sent",
            "; ".join(filter(None, ("internal" if each.is_internal else "", each.note))),
        )
        for each in own
    ]


def _status_in_detokenizer(tensor: OutputTensor) -> str:
    return "served" if tensor.path is Path.TO_DETOKENIZER else "passed on"


def _internal(tensor: OutputTensor) -> str:
    return "internal" if tensor.is_internal else ""


def _key_rows() -> list[str]:
    """The table of the keys of `sampling_parameters`."""
    rows = []
    frontend = Frontend.SAMPLING_PARAMETERS
    for key, field in fields_at(frontend).items():
        if field.served:
            rows.append(f"| `{key}` | {_key_value(field)} | served | {key_note(field, frontend)} |")
        else:
            taken = " or ".join(f"`{json.dumps(value)}`" for value in field.key_off)
            rows.append(f"| `{key}` | | refused | {f'{taken} is accepted' if taken else ''} |")
    return [row.replace("|  |", "| |") for row in rows]


def _key_value(field: Field) -> str:
    if field.key == "logit_bias":
        return "object of token ids and numbers"
    if field.is_scalar:
        return _KEY_VALUES[field.kind]
    return "text, or a list" if field.kind is Kind.STRING else "list of token ids"


def key_note(field: Field, frontend: Frontend) -> str:
    """Return the note on a field that this frontend takes as a key of a JSON object."""
    other_name = f"as `{field.name}`" if field.name_at(frontend) != field.name else ""
    has_default = field.key_default is not None and frontend is Frontend.SAMPLING_PARAMETERS
    default = f"default {_shown(field.key_default)}" if has_default else ""
    off = " and ".join(map(_shown, field.key_off))
    above = "" if field.key_above is None else f"> {_shown(field.key_above)}"
    own = field.notes.get(frontend, "" if frontend is Frontend.SAMPLING_PARAMETERS else field.note)
    return _join(
        other_name,
        "" if frontend is Frontend.SAMPLING_PARAMETERS else _count(field),
        above or _bounds(field),
        default,
        f"{off} = not sent" if off else "",
        own,
    )


def note(field: Field, frontend: Frontend) -> str:
    """Return the page's note on a field of a frontend: its bounds, its rules and its own sentence."""
    sentence = field.notes.get(frontend, field.note)
    if not field.served:
        return _join(_off_of_refused(field), sentence)
    if field.alias_of:
        alias = f"alias of `{field.alias_of}`; if both are sent they must be equal"
        return _join(alias, sentence)
    return _join("required" if field.required else "", *_rules(field), sentence)


def _rules(field: Field) -> list[str]:
    with_beams = "not with beams" if field.with_beams == () else ""
    without_beams = ""
    if field.without_beams is not None:
        without_beams = f"without beams only {' and '.join(map(_shown, field.without_beams))}"
    return [_count(field), _bounds(field), _off(field), with_beams, without_beams]


def _count(field: Field) -> str:
    if field.kind is Kind.STRING and field.is_scalar:
        return f"at most {field.max_item_size:,} bytes" if field.max_item_size else ""
    if not field.max_items:
        return ""
    if not field.max_item_size:
        return f"at most {field.max_items:,}"
    noun = "bytes" if field.kind is Kind.STRING else "ids"
    return f"at most {field.max_items:,} words of {field.max_item_size:,} {noun} each"


def _bounds(field: Field) -> str:
    has_low, has_high = field.minimum not in _NO_BOUNDS, field.maximum not in _NO_BOUNDS
    if has_low and has_high:
        return f"{_shown(field.minimum)} … {_shown(field.maximum)}"
    above = "" if field.above is None else f"> {_shown(field.above)}"
    low = f"≥ {_shown(field.minimum)}" if has_low else above
    high = f"≤ {_shown(field.maximum)}" if has_high else ""
    return ", ".join(filter(None, (low, high)))


def _off(field: Field) -> str:
    if field.off is None:
        return ""
    return f"{'≤ ' if field.off_includes_less else ''}{_shown(field.off)} = off"


def _off_of_refused(field: Field) -> str:
    if not field.off_values:
        return ""
    verb = "means" if len(field.off_values) == 1 else "mean"
    return f"{' and '.join(map(_shown, field.off_values))} {verb} off"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return text.replace("-", "−")


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _row(name: str, kind: Kind, dims: tuple[int, ...], status: str, text: str) -> str:
    shown_dims = ", ".join(map(str, dims))
    return f"| `{name}` | {kind.value}[{shown_dims}] | {status} | {text} |".replace("|  |", "| |")
