"""Spans, and their encoding as OTLP/JSON."""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from naiad import __version__

Value = str | bool | int | float | Sequence[str]

_MAX_INT = 2**63 - 1
_ERROR = 2


class SpanKind(enum.IntEnum):
    """OTLP's numbers of the kinds that are used."""

    INTERNAL = 1
    SERVER = 2


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span that has ended.

    Attributes:
        name: what was done.
        kind: whether it answers somebody outside.
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        parent_id: the id of the span that caused it; empty: none is known.
        trace_state: W3C's `tracestate`.
        begin_ns, end_ns: Unix time.
        attributes: by OpenTelemetry's names.
        error: the message of the error that it ended with; empty: none.
    """

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_id: str = ""
    trace_state: str = ""
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = {}
    error: str = ""


class _AnyValue(msgspec.Struct, rename="camel", omit_defaults=True, gc=False):
    string_value: str | None = None
    bool_value: bool | None = None
    # JSON's numbers are too small for 64 bits, so OTLP writes such integers as text.
    int_value: str | None = None
    double_value: float | None = None
    array_value: _Array | None = None


class _Array(msgspec.Struct, gc=False):
    values: list[_AnyValue]


class _KeyValue(msgspec.Struct, gc=False):
    key: str
    value: _AnyValue


class _Status(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    code: int = 0
    message: str = ""


class _Span(msgspec.Struct, rename="camel", omit_defaults=True, gc=False):
    trace_id: str
    span_id: str
    name: str
    kind: int
    start_time_unix_nano: str
    end_time_unix_nano: str
    parent_span_id: str = ""
    trace_state: str = ""
    attributes: list[_KeyValue] = []
    status: _Status = _Status()


class _Scope(msgspec.Struct):
    name: str
    version: str


class _ScopeSpans(msgspec.Struct):
    scope: _Scope
    spans: list[_Span]


class _Resource(msgspec.Struct):
    attributes: list[_KeyValue]


class _ResourceSpans(msgspec.Struct, rename="camel"):
    resource: _Resource
    scope_spans: list[_ScopeSpans]


class _Export(msgspec.Struct, rename="camel"):
    resource_spans: list[_ResourceSpans]


def new_trace_id() -> str:
    """Draw the id of a trace."""
    return os.urandom(16).hex()


def new_span_id() -> str:
    """Draw the id of a span."""
    return os.urandom(8).hex()


def process_attributes(service: str) -> dict[str, Value]:
    """What describes this process.

    Args:
        service: its name.
    """
    return {
        "service.name": service,
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "process.pid": os.getpid(),
    }


def encode_spans(resource: Mapping[str, Value], spans: Iterable[Span]) -> bytes:
    """Encode spans as the body of an OTLP/HTTP request.

    Args:
        resource: attributes of what made them.
        spans: the spans.
    """
    scope = _ScopeSpans(_Scope("naiad", __version__), [_written(span) for span in spans])
    return msgspec.json.encode(_Export([_ResourceSpans(_Resource(_attributes(resource)), [scope])]))


def _written(span: Span) -> _Span:
    return _Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        trace_state=span.trace_state,
        name=span.name,
        kind=int(span.kind),
        start_time_unix_nano=str(span.begin_ns),
        end_time_unix_nano=str(span.end_ns),
        attributes=_attributes(span.attributes),
        status=_Status(_ERROR, span.error) if span.error else _Status(),
    )


def _attributes(values: Mapping[str, Value]) -> list[_KeyValue]:
    return [_KeyValue(key, _any_value(value)) for key, value in values.items()]


def _any_value(value: Value) -> _AnyValue:
    match value:
        case str():
            return _AnyValue(string_value=value)
        case bool():
            return _AnyValue(bool_value=value)
        case int():
            # OTLP's integers have a sign: what is larger, such as half of all seeds, is sent as text.
            return (
                _AnyValue(int_value=str(value)) if value <= _MAX_INT else _AnyValue(string_value=str(value))
            )
        case float():
            return _AnyValue(double_value=value)
    return _AnyValue(array_value=_Array([_AnyValue(string_value=each) for each in value]))
