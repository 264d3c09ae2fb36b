"""The prober against a gRPC server that answers like a healthy or a broken tritonserver."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from naiad.cli.repository.model_entries import ModelEntry, find_repository, read_model, read_repository
from naiad.cli.repository.presets import shipped_model
from naiad.cli.serve.probes import Prober, connection_failure, probe_request
from naiad.cli.serve.unloading import VersionState
from naiad.config.probe import PROBE_REQUEST_ID

ENTRIES = {entry.name: entry for entry in read_repository(find_repository(None))}
OURS = [ENTRIES[name] for name in ("tokenizer", "llm", "detokenizer", "text")]
VLLM = read_model(shipped_model("vllm"))

Answer = Callable[[Any], Iterator[Any]]


class FakeServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, answer: Answer) -> None:
        self.asked: list[Any] = []
        self.ready: list[str] = []
        self.unloading: list[str] = []
        self.metadata: dict[str, str] = {}
        self._answer = answer

    def RepositoryIndex(self, request: Any, _context: Any) -> Any:  # noqa: N802 — gRPC's name
        assert not request.ready
        self.metadata = dict(_context.invocation_metadata())
        index = service_pb2.RepositoryIndexResponse()
        for name in self.ready:
            index.models.add(name=name, version="1", state="READY")
        for name in self.unloading:
            index.models.add(name=name, version="2", state="UNLOADING")
        return index

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802 — gRPC's name
        if request.name not in ENTRIES:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        return service_pb2.ModelConfigResponse(config=ENTRIES[request.name].config)

    def ModelStreamInfer(self, requests: Any, _context: Any) -> Iterator[Any]:  # noqa: N802 — gRPC's name
        for request in requests:
            self.asked.append(request)
            yield from self._answer(request)


class Fake:
    """A server that gives this answer to every request."""

    def __init__(self, answer: Answer) -> None:
        self.servicer = FakeServicer(answer)
        self._server = grpc.server(ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self.servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Fake]]:
    started: list[Fake] = []

    def start(answer: Answer) -> Fake:
        started.append(Fake(answer))
        return started[-1]

    yield start
    for each in started:
        each.stop()


class Live(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/health/live" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:  # type: ignore[override]
        """Quiet."""


def nothing(_request: Any) -> Iterator[Any]:
    yield from ()


def says(message: str) -> Answer:
    return lambda request: iter([service_pb2.ModelStreamInferResponse(error_message=message)])


def test_every_model_of_ours_is_asked_with_the_reserved_id(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(nothing)
    assert Prober(fake.address, ENTRIES.values(), 5).probe() is None
    asked = fake.servicer.asked
    assert {request.model_name for request in asked} == {entry.name for entry in OURS}
    assert {request.id for request in asked} == {PROBE_REQUEST_ID}


def test_probes_send_what_the_models_declare() -> None:
    for entry in [*OURS, VLLM]:
        request = probe_request(entry)
        assert request is not None
        declared = {each.name: each for each in entry.config.input}
        required = {each.name for each in entry.config.input if not each.optional}
        assert required <= {tensor.name for tensor in request.inputs}
        for tensor in request.inputs:
            assert tensor.name in declared
            has_rows = entry.config.max_batch_size > 0
            assert len(tensor.shape) == has_rows + len(declared[tensor.name].dims)


@pytest.mark.parametrize("name", ["llm", "text"])
def test_the_probe_of_a_model_that_generates_only_asks_to_stop(name: str) -> None:
    request = probe_request(ENTRIES[name])
    assert request is not None
    stop = next(tensor for tensor in request.inputs if tensor.name == "stop")
    assert list(stop.contents.bool_contents) == [True]


def test_a_model_of_somebody_else_is_not_asked() -> None:
    assert probe_request(ModelEntry("resnet", None, {}, frozenset())) is None


@pytest.mark.parametrize(
    "message", ["Stub process 'llm_0_0' is not healthy.", "Request for unknown model: 'llm' is not found"]
)
def test_a_dead_model_is_an_error(serve: Callable[[Answer], Fake], message: str) -> None:
    failure = Prober(serve(says(message)).address, [ENTRIES["llm"]], 5).probe()
    assert failure is not None
    assert not failure.is_silence
    assert failure.reason == f"llm: {message}"


def test_a_model_that_answers_with_an_error_of_its_own_lives(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(says("the engine process restarts: try again"))
    assert Prober(fake.address, [ENTRIES["llm"]], 5).probe() is None


def test_without_names_those_that_are_ready_are_asked(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(nothing)
    prober = Prober(fake.address, None, 5)
    for ready in (["llm", "ensemble"], ["tokenizer", "unloaded meanwhile"], []):
        fake.servicer.ready = ready
        fake.servicer.asked.clear()
        assert prober.probe() is None
        assert {request.model_name for request in fake.servicer.asked} == {"llm", "tokenizer"} & set(ready)


def test_a_model_that_is_unloading_is_not_asked(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(nothing)
    fake.servicer.ready, fake.servicer.unloading = ["llm"], ["tokenizer"]
    states: list[VersionState] = []
    assert Prober(fake.address, None, 5, take_states=states.extend).probe() is None
    assert [request.model_name for request in fake.servicer.asked] == ["llm"]
    assert states == [("llm", "1", "READY"), ("tokenizer", "2", "UNLOADING")]


def test_a_model_that_is_unloaded_while_asked_is_not_dead(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(says("Request for unknown model: 'llm' is not found"))
    fake.servicer.ready = ["llm"]
    assert Prober(fake.address, None, 5).probe() is None


def test_a_dead_stub_is_an_error_also_where_models_are_unloaded(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(says("Stub process 'llm_0_0' is not healthy."))
    fake.servicer.ready = ["llm"]
    failure = Prober(fake.address, None, 5).probe()
    assert failure is not None
    assert not failure.is_silence


def test_no_answer_is_silence(serve: Callable[[Answer], Fake]) -> None:
    def hang(_request: Any) -> Iterator[Any]:
        time.sleep(1)
        yield from ()

    failure = Prober(serve(hang).address, [ENTRIES["llm"]], 0.2).probe()
    assert failure is not None
    assert failure.is_silence


def test_nobody_listening_is_an_error(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(nothing)
    fake.stop()
    failure = Prober(fake.address, [ENTRIES["llm"]], 5).probe()
    assert failure is not None
    assert not failure.is_silence


def test_repository_of_the_checkout_is_the_default() -> None:
    assert find_repository(None) == Path(__file__).parents[2] / "model_repository"


def test_the_key_of_model_control_goes_along_when_models_are_listed(serve: Callable[[Answer], Fake]) -> None:
    fake = serve(nothing)
    fake.servicer.ready = ["tokenizer"]
    assert Prober(fake.address, None, 5, (("a-header", "k"),)).probe() is None
    assert fake.servicer.metadata["a-header"] == "k"


def test_a_server_that_takes_no_new_connections_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        failure = connection_failure(address, 0.2)
        assert failure is not None
        assert failure.is_silence
        assert "not answer new connections" in failure.reason
    assert connection_failure(address, 0.2) is not None


def test_a_server_that_answers_takes_new_connections() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), Live)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert connection_failure(f"127.0.0.1:{server.server_port}", 20) is None
    finally:
        server.shutdown()
        server.server_close()
