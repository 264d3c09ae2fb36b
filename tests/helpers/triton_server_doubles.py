"""Test doubles for the interface with Triton."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from naiad.errors import NaiadError
from naiad.frontend.limits import ModelLimits
from naiad.sequence import EngineRequest
from naiad.tracing.trace_context import NO_TRACE, TraceContext
from naiad.triton_server.requests.llm import read_request
from naiad.triton_server.responses.llm import probe_tensors, response_tensors
from naiad.triton_server.responses.stream import StreamRow
from naiad.triton_server.service.llm_service import NUM_SENDERS, LLMService, RequestShape

LIMITS = ModelLimits(max_model_len=100, vocab_size=1000, eos_token_ids=(2,), exclude_input_in_output=False)
LLM_SHAPE = RequestShape(read=read_request, build=response_tensors, build_probe=probe_tensors)


@dataclass
class FakeSource:
    """A request as sent by a client."""

    inputs: dict[str, Any] = field(default_factory=dict)
    sent_parameters: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    timeout_us: int = 0
    sent_trace: TraceContext = NO_TRACE
    outputs: tuple[str, ...] = ("text_chunk",)

    def requested_outputs(self) -> tuple[str, ...]:
        return self.outputs

    def tensors(self) -> dict[str, Any]:
        return self.inputs

    def trace_context(self) -> TraceContext:
        return self.sent_trace

    def parameters(self) -> dict[str, Any]:
        return self.sent_parameters


def llm_source(
    prompt: list[int] | None = None, *, parameters: dict[str, Any] | None = None, **tensors: Any
) -> FakeSource:
    """A minimal request to `llm`; keywords are further tensors, scalars become [1, 1]."""
    ids = [5, 6, 7] if prompt is None else prompt
    inputs: dict[str, Any] = {
        "input_ids": np.array([ids], dtype=np.int32).reshape(1, -1),
        "input_lengths": np.array([[len(ids)]], dtype=np.int32),
        "request_output_len": np.array([[4]], dtype=np.int32),
    }
    for name, value in tensors.items():
        inputs[name] = value if isinstance(value, np.ndarray) else np.array([[value]])
    return FakeSource(inputs, parameters or {})


class FakeSender:
    """Records what was sent, and checks that nothing follows FINAL."""

    def __init__(self) -> None:
        self.responses: list[dict[str, Any]] = []
        self.errors: list[NaiadError] = []
        self.num_finals = 0
        self.cancelled = False

    def send(self, tensors: dict[str, Any] | None, *, final: bool) -> None:
        assert self.num_finals == 0, "a response after FINAL"
        if tensors is not None:
            self.responses.append(tensors)
        self.num_finals += final

    def send_error(self, error: NaiadError) -> None:
        assert self.num_finals == 0, "an error after FINAL"
        self.errors.append(error)
        self.num_finals += 1

    def is_cancelled(self) -> bool:
        return self.cancelled


class FakeEngineClient:
    """An engine client that only records its calls."""

    def __init__(self) -> None:
        self.submitted: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.stopped: list[str] = []
        self.error: NaiadError | None = None

    def submit(self, requests: list[EngineRequest]) -> None:
        if self.error:
            raise self.error
        self.submitted += requests

    def abort(self, sequence_ids: list[int]) -> None:
        self.aborted += sequence_ids

    def stop_others(self, request_id: str) -> None:
        self.stopped.append(request_id)


class CountedIds:
    """Draws 1, 2, … instead of the service's random ids."""

    def __init__(self) -> None:
        self._next_id = 1

    def __call__(self, num_sequences: int) -> int:
        self._next_id += num_sequences
        return self._next_id - num_sequences


class _Marker:
    """Passes through a sender's queue like a stream."""

    is_closed = wants_ack = False

    def __init__(self, number: int) -> None:
        self.lock = threading.Lock()
        self.rows = [StreamRow(0, number)]
        self.was_seen = threading.Event()

    def flush(self, *_: object) -> None:
        self.was_seen.set()


def let_senders_finish(service: LLMService) -> None:
    """Wait until the sender threads have processed everything that is queued now."""
    markers = [_Marker(number) for number in range(NUM_SENDERS)]
    for marker in markers:
        service._senders.schedule(marker)  # type: ignore[arg-type]
    assert all(marker.was_seen.wait(30) for marker in markers), "a sender does not finish"
