"""Tensors and parameters of a Triton request → plain values under the names of the table of fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from naiad.frontend.field import Field, Frontend, Kind
from naiad.frontend.fields import fields_at, known_parameters

Array = npt.NDArray[Any]

_SERVED = {
    frontend: {name: field for name, field in fields_at(frontend).items() if field.served}
    for frontend in Frontend
}
_PARAMETERS = known_parameters(Frontend.LLM)


class RequestSource(Protocol):
    """What a reader needs of a Triton request."""

    @property
    def request_id(self) -> str:
        """The client's id; may be empty."""

    @property
    def timeout_us(self) -> int:
        """Triton's `timeout` in µs; 0 = none."""

    def parameters(self) -> Mapping[str, Any]:
        """The request parameters."""

    def tensors(self) -> Mapping[str, Array]:
        """The input tensors by name, batch dimension included."""


def sent_rows(
    tensors: Mapping[str, Array],
    parameters: Mapping[str, Any],
    frontend: Frontend,
    num_rows: int,
    apart: Collection[str] = (),
) -> list[dict[str, Any]]:
    """What each row sent: field name → a number, a string, or a list of one of them; a tensor wins.

    Args:
        tensors: [num_rows, …] by the frontend's names.
        parameters: of the request, which every row shares.
        frontend: that they were sent to.
        num_rows: of the request.
        apart: names of tensors that are left out.

    Raises:
        FieldError: a tensor has not one value a row where one is expected, or no valid UTF-8.
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
    """The parameters that are fields, under the fields' names."""
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


def asks_to_stop(tensors: Mapping[str, Array], parameters: Mapping[str, Any]) -> bool:
    """Whether all rows say `stop`. Such a request needs nothing else, and nothing else of it is read."""
    if "stop" in tensors:
        return bool(tensors["stop"].all())
    return parameters.get("stop") is True


def timeout_us(source: RequestSource, parameters: Mapping[str, Any]) -> Any:
    """The deadline as it was sent: Triton's own field (gRPC), or the parameter (HTTP generate)."""
    return source.timeout_us or parameters.get("timeout", 0)


def _value(field: Field, tensor: Array) -> Any:
    if not field.is_scalar:
        values = tensor.reshape(-1).tolist()
        return [field.decoded(raw) for raw in values] if field.kind is Kind.STRING else values
    if tensor.size != 1:
        raise field.error(f" has {tensor.size} values a row: expected one")
    value = tensor.item()
    return field.decoded(value) if field.kind is Kind.STRING else value
