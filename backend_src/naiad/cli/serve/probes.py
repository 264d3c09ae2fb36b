"""Sends a request to each of Naiad's models, to find out whether the server still serves."""

from __future__ import annotations

import errno
import http.client
import re
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from naiad.cli.repository.model_entries import ModelEntry, model_entry
from naiad.cli.serve.unloading import VersionState
from naiad.config.probe import PROBE_REQUEST_ID

# The server's errors when a model's process is gone; any other error comes from a live one.
_DEAD_STUB = re.compile(r"stub process|not healthy", re.IGNORECASE)
# Proves a failure only if clients cannot unload models.
_MISSING_MODEL = re.compile(r"is not ready|unknown model", re.IGNORECASE)
_READY = "READY"


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """The failure of a probe.

    Attributes:
        reason: a description for the log.
        is_silence: whether there was no answer in time, rather than an error.
    """

    reason: str
    is_silence: bool


def connection_failure(address: str, timeout_s: float) -> ProbeFailure | None:
    """Return why a server takes no new client; one whose connection stands would not notice.

    Args:
        address: HOST:PORT of HTTP.
        timeout_s: how long it may take to answer.
    """
    try:
        with urllib.request.urlopen(f"http://{address}/v2/health/live", timeout=timeout_s):
            return None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if getattr(reason, "errno", None) in (errno.EMFILE, errno.ENFILE):
            # It is this process that has no descriptors.
            return None
        return ProbeFailure(f"the server does not answer new connections ({error})", is_silence=True)


class Prober:
    """Sends cheap requests that reach each Python model but not the engine."""

    def __init__(
        self,
        address: str,
        entries: Iterable[ModelEntry] | None,
        timeout_s: float,
        metadata: Sequence[tuple[str, str]] = (),
        take_states: Callable[[Iterable[VersionState]], None] = lambda _: None,
    ) -> None:
        """Connect lazily.

        Args:
            address: HOST:PORT of gRPC.
            entries: the models to probe; None: those that the server reports as ready.
            timeout_s: timeout of each model's probe.
            metadata: what the server wants to see before it lists its models.
            take_states: takes what the server says of its models, each time that it lists them.
        """
        self._channel = grpc.insecure_channel(address)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._requests = None if entries is None else _requests(entries)
        self._timeout_s = timeout_s
        self._metadata = tuple(metadata)
        self._take_states = take_states

    def probe(self) -> ProbeFailure | None:
        """Send each model one request; return the first failure."""
        requests = self._requests
        if requests is None:
            try:
                requests = _requests(self._ready_models())
            except (grpc.RpcError, ValueError) as error:
                return self._failure("the server", error)
        for request in requests:
            failure = self._ask(request)
            if failure is not None:
                return failure
        return None

    def close(self) -> None:
        """Close the connection, which would delay the server's exit."""
        self._channel.close()

    def _ask(self, request: Any) -> ProbeFailure | None:
        name = request.model_name
        try:
            # A stream works for decoupled models and for the others.
            for message in self._stub.ModelStreamInfer(iter([request]), timeout=self._timeout_s):
                if self._says_dead(message.error_message):
                    return ProbeFailure(f"{name}: {message.error_message}", is_silence=False)
        except (grpc.RpcError, ValueError) as error:
            return self._failure(name, error)
        return None

    def _says_dead(self, text: str) -> bool:
        return bool(_DEAD_STUB.search(text) or (self._requests is not None and _MISSING_MODEL.search(text)))

    def _failure(self, name: str, error: Any) -> ProbeFailure:
        if isinstance(error, ValueError):
            return ProbeFailure(f"{name}: the connection was closed", is_silence=True)
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return ProbeFailure(f"{name}: no answer in {self._timeout_s:g} s", is_silence=True)
        return ProbeFailure(f"{name}: {error.code().name}: {error.details()}", is_silence=False)

    def _ready_models(self) -> list[ModelEntry]:
        index = self._stub.RepositoryIndex(
            service_pb2.RepositoryIndexRequest(), timeout=self._timeout_s, metadata=self._metadata
        )
        states = [VersionState(model.name, model.version, model.state) for model in index.models]
        self._take_states(states)
        entries = []
        for name in {each.model for each in states if each.state == _READY}:
            try:
                answer = self._stub.ModelConfig(
                    service_pb2.ModelConfigRequest(name=name), timeout=self._timeout_s
                )
            except grpc.RpcError as error:
                # The model has been unloaded since.
                if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
                    continue
                raise
            entries.append(model_entry(name, answer.config))
        return entries


def _requests(entries: Iterable[ModelEntry]) -> list[Any]:
    return [request for entry in entries if (request := probe_request(entry)) is not None]


def probe_request(entry: ModelEntry) -> Any | None:
    """Make a `ModelInferRequest` that this model answers at once; None for models that are not Naiad's."""
    if entry.kind == "llm":
        return _request(
            entry.name,
            _int_tensor("input_ids", [1, 1], 0),
            _int_tensor("input_lengths", [1, 1], 1),
            _int_tensor("request_output_len", [1, 1], 1),
            _tensor("stop", "BOOL", [1, 1], bool_contents=[True]),
        )
    if entry.kind == "tokenizer":
        return _request(
            entry.name,
            _tensor("QUERY", "BYTES", [1, 1], bytes_contents=[b"x"]),
            _int_tensor("REQUEST_OUTPUT_LEN", [1, 1], 1),
        )
    if entry.kind == "text":
        return _request(entry.name, _tensor("stop", "BOOL", [1, 1], bool_contents=[True]))
    if entry.kind == "vllm":
        return _request(entry.name, _tensor("text_input", "BYTES", [1], bytes_contents=[b"x"]))
    if entry.kind == "detokenizer":
        return _request(
            entry.name,
            _int_tensor("TOKENS_BATCH", [1, 1, 1], 0),
            _int_tensor("SEQUENCE_LENGTH", [1, 1], 1),
        )
    return None


def _request(model_name: str, *tensors: Any) -> Any:
    return service_pb2.ModelInferRequest(model_name=model_name, id=PROBE_REQUEST_ID, inputs=tensors)


def _int_tensor(name: str, shape: Sequence[int], value: int) -> Any:
    return _tensor(name, "INT32", shape, int_contents=[value])


def _tensor(name: str, datatype: str, shape: Sequence[int], **contents: list[Any]) -> Any:
    return service_pb2.ModelInferRequest.InferInputTensor(
        name=name,
        datatype=datatype,
        shape=shape,
        contents=service_pb2.InferTensorContents(**contents),
    )
