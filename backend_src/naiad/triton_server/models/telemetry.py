"""Sets up the tracing and recording of a model's requests, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from naiad.config.model_location import path_of_text
from naiad.frontend.request_families import TRITON_DOOR
from naiad.recording.record_file import RECORD_FILE, RECORD_PROMPTS, RecordFile
from naiad.recording.recorder import Recorder
from naiad.tracing.exporter import OTLP_ENDPOINT, Collector, SpanExporter
from naiad.tracing.request_trace import Tracer
from naiad.tracing.span import process_attributes
from naiad.triton_server.models.parameters import read_bool
from naiad.triton_server.service.llm_service import Telemetry, Tracing


def make_telemetry(
    parameters: Mapping[str, str], triton_model: str, served_name: Callable[[], str | None]
) -> Telemetry:
    """Start to send spans and to record, if the model's parameters say where.

    Args:
        parameters: the parameters in config.pbtxt.
        triton_model: the model's name at the server.
        served_name: returns the name of the checkpoint that answers; None while no engine serves.

    Raises:
        ConfigError: a parameter has a value that is not allowed.
    """

    def model() -> str:
        return served_name() or triton_model

    return Telemetry(_make_tracing(parameters, triton_model, model), _make_recorder(parameters, model))


def _make_tracing(
    parameters: Mapping[str, str], triton_model: str, model: Callable[[], str]
) -> Tracing | None:
    endpoint = parameters.get(OTLP_ENDPOINT, "")
    if not endpoint:
        return None
    resource = process_attributes("naiad") | {"naiad.model": triton_model}
    exporter = SpanExporter(Collector.parse(OTLP_ENDPOINT, endpoint), resource)
    return Tracing(Tracer(exporter), model)


def _make_recorder(parameters: Mapping[str, str], model: Callable[[], str]) -> Recorder | None:
    with_prompts = read_bool(parameters, RECORD_PROMPTS, default=False)
    path = parameters.get(RECORD_FILE, "")
    if not path:
        return None
    file = RecordFile(Path(path_of_text(path)))
    return Recorder(file, TRITON_DOOR, model, with_prompts=with_prompts)
