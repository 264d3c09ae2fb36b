"""Sets up the tracing of a model's requests, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from naiad.tracing.exporter import OTLP_ENDPOINT, Collector, SpanExporter
from naiad.tracing.request_trace import Tracer
from naiad.tracing.span import process_attributes
from naiad.triton_server.service.llm_service import Tracing


def make_tracing(
    parameters: Mapping[str, str], triton_model: str, served_name: Callable[[], str | None]
) -> Tracing | None:
    """Start to send spans if the model's parameters name a collector.

    Args:
        parameters: the parameters in config.pbtxt.
        triton_model: the model's name at the server.
        served_name: returns the name of the checkpoint that answers; None while no engine serves.

    Raises:
        ConfigError: the address is none.
    """
    endpoint = parameters.get(OTLP_ENDPOINT, "")
    if not endpoint:
        return None
    resource = process_attributes("naiad") | {"naiad.model": triton_model}
    exporter = SpanExporter(Collector.parse(OTLP_ENDPOINT, endpoint), resource)
    return Tracing(Tracer(exporter), lambda: served_name() or triton_model)
