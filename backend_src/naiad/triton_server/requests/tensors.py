"""Reads the tensors and parameters of a Triton request as plain values, by the names of `FIELDS`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from naiad.errors import InvalidRequestError
from naiad.frontend.field import Field, Frontend, Kind
from naiad.frontend.fields import FIELDS, fields_at, known_parameters
from naiad.tracing.trace_context import TraceContext, read_trace_context

Array = npt.NDArray[Any]

_SERVED = {
    frontend: {name: field for name, field in fields_at(frontend).items() if field.served}
    for frontend in Frontend
}
_KNOWN_PARAMETERS = {frontend: known_parameters(frontend) for frontend in Frontend}
_PARAMETERS = _KNOWN_PARAMETERS[Frontend.LLM]
_SERVERS_OWN_PARAMETERS = re.compile(
    r"id|timeout|sequence_(id|start|end)|triton_enable_empty_final_response|binary_data_output"
)
# Fields that no frontend with rows serves; all of those frontends refuse them, under any of their names.
_NOT_SERVED: Mapping[str, Field] = {
    name: field
    for field in FIELDS
    if not field.served
    for name in (field.name_at(Frontend.TEXT), field.name_at(Frontend.LLM))
    if name
}


class RequestSource(Protocol):
    """The parts of a Triton request that a reader uses."""

    @property
    def request_id(self) -> str:
        """The client's id; it may be empty."""

    @property
    def timeout_us(self) -> int:
        """Triton's `timeout` in µs; 0 = none."""

    def parameters(self) -> Mapping[str, Any]:
        """The request parameters."""

    def tensors(self) -> Mapping[str, Array]:
        """The input tensors by name, batch dimension included."""

    def requested_outputs(self) -> Collection[str]:
        """The names of the outputs that whoever sent it takes."""

    def trace_context(self) -> TraceContext:
        """The trace that the request belongs to."""


class TritonRequest:
    """A `pb_utils.InferenceRequest`, read as a `RequestSource`."""

    def __init__(self, request: Any) -> None:
        """Wrap the request."""
        self._request = request

    @property
    def request_id(self) -> str:
        """The client's id; it may be empty, and need not be unique."""
        return str(self._request.request_id())

    @property
    def timeout_us(self) -> int:
        """Triton's `timeout` in µs; 0 = none."""
        return int(self._request.timeout())

    def parameters(self) -> dict[str, Any]:
        """The request parameters."""
        parsed = json.loads(self._request.parameters() or "{}")
        return parsed if isinstance(parsed, dict) else {}

    def tensors(self) -> dict[str, Array]:
        """All input tensors, batch dimension included."""
        return {tensor.name(): tensor.as_numpy() for tensor in self._request.inputs()}

    def requested_outputs(self) -> list[str]:
        """The names of the outputs that its client names, or of all if it names none."""
        return list(self._request.requested_output_names())

    def trace_context(self) -> TraceContext:
        """The trace that the request belongs to, as the server passes it on."""
        headers = json.loads(self._request.trace().get_context() or "{}")
        return read_trace_context([headers.get("traceparent", "")], [headers.get("tracestate", "")])


def sent_rows(
    tensors: Mapping[str, Array],
    parameters: Mapping[str, Any],
    frontend: Frontend,
    num_rows: int,
    apart: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Read each row's fields: field name → a number, a string, or a list of either.

    If a field is sent both as a tensor and as a parameter, the tensor wins.

    Args:
        tensors: [num_rows, …], by the frontend's names.
        parameters: the request's parameters, which all rows share.
        frontend: the frontend that received the request.
        num_rows: number of rows of the request.
        apart: names of tensors to leave out.

    Raises:
        FieldError: a tensor of a scalar field does not have one value for each row, or a string is not
            valid UTF-8.
    """
    fields = _SERVED[frontend]
    common = sent_parameters(parameters)
    known = [
        (fields[name], tensor) for name, tensor in tensors.items() if name in fields and name not in apart
    ]
    return [
        common | {field.name: _value(field, tensor[row : row + 1]) for field, tensor in known}
        for row in range(num_rows)
    ]


def sent_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are fields, by the fields' names."""
    sent: dict[str, Any] = {}
    repeated: dict[str, Any] = {}
    for name, value in parameters.items():
        field = _PARAMETERS.get(name)
        if field is None:
            continue
        if field.repeats:
            repeated[field.repeats] = value
        elif not field.is_scalar:
            sent[name] = [str(value)]
        else:
            sent[name] = str(value) if field.sets == "prompt" else value
    return repeated | sent


def refuse_unknown_parameters(parameters: Mapping[str, Any], frontend: Frontend, forwarded: str) -> None:
    """Refuse parameters that the frontend does not read.

    Args:
        parameters: the request's parameters.
        frontend: the frontend that received the request.
        forwarded: regular expression of the header names that the server forwards as parameters; "" = none.

    Raises:
        InvalidRequestError: a parameter is unknown; the message names it and those that are allowed.
    """
    known = _KNOWN_PARAMETERS[frontend]
    for name in parameters:
        if name in known or name in _NOT_SERVED or _SERVERS_OWN_PARAMETERS.fullmatch(name):
            continue
        if forwarded and re.fullmatch(forwarded, name):
            continue
        raise InvalidRequestError(
            f"unknown parameter {name[:80]!r}: allowed are {', '.join(sorted(known))}, id, timeout"
        )


def refuse_unserved(sent: Mapping[str, Any], fields: Mapping[str, Field] = _NOT_SERVED) -> None:
    """Refuse fields that are not served, unless their values ask for nothing.

    Args:
        sent: tensors (arrays [rows, …]) or parameters (plain values) by name.
        fields: the frontend's fields, by the same names.

    Raises:
        FieldError: a field is refused; the message names it.
    """
    for name, value in sent.items():
        field = fields.get(name)
        if field is not None and not field.served and not field.asks_for_nothing(value):
            raise field.error(" is not supported by this version of Naiad: do not send it")


def asks_to_stop(tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> bool:
    """Whether `stop` is true in all rows. Nothing else of such a request is required or read."""
    if "stop" in tensors:
        return bool(tensors["stop"].all())
    return parameters.get("stop") is True


def timeout_us(source: RequestSource, parameters: Mapping[str, Any]) -> Any:
    """The timeout as it was sent: Triton's own field (gRPC) or the parameter (HTTP generate)."""
    return source.timeout_us or parameters.get("timeout", 0)


def _value(field: Field, tensor: Array) -> Any:
    if not field.is_scalar:
        values = tensor.reshape(-1).tolist()
        return [field.decoded(raw) for raw in values] if field.kind is Kind.STRING else values
    if tensor.size != 1:
        raise field.error(f" has {tensor.size} values a row: expected one")
    value = tensor.item()
    return field.decoded(value) if field.kind is Kind.STRING else value
