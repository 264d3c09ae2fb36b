"""gRPC streams read as raw protos: tritonclient hides FINAL on errors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype

# Number of tokens that a tiny model with a long window does not reach during a test.
ENDLESS = 30_000
_BOOL_PARAMETERS = {"triton_enable_empty_final_response": True}


@dataclass
class Outcome:
    """Everything that a stream has received."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_finals: int = 0
    call_error: str = ""

    @property
    def token_ids(self) -> list[int]:
        """All `output_ids`, concatenated."""
        return [i for r in self.responses if "output_ids" in r for i in r["output_ids"].reshape(-1).tolist()]

    @property
    def text(self) -> str:
        """All `text_output`, concatenated."""
        return b"".join(
            r["text_output"].reshape(-1)[0] for r in self.responses if "text_output" in r
        ).decode()

    def take(self, message: Any) -> None:
        """Add a message of the stream."""
        response = message.infer_response
        if message.error_message:
            self.errors.append(message.error_message)
        if response.parameters["triton_final_response"].bool_param:
            self.num_finals += 1
        if response.outputs:
            result = triton.InferResult(response)
            self.responses.append({o.name: result.as_numpy(o.name) for o in response.outputs})


class Stream:
    """One request on a stream of its own."""

    def __init__(
        self, url: str, model: str, inputs: dict[str, Any], deadline_s: float | None = None, **request: Any
    ) -> None:
        """Send the request.

        Args:
            url: HOST:PORT of the server.
            model: its model.
            inputs: its tensors.
            deadline_s: after how many seconds the client gives up; None: never.
            request: may have request_id, model_version, parameters and timeout.
        """
        self._channel = grpc.insecure_channel(url)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sent.put(build_request(model, inputs, **request))
        self._sent.put(None)
        self.outcome = Outcome()
        self.got_response = threading.Event()
        self._call = stub.ModelStreamInfer(iter(self._sent.get, None), timeout=deadline_s)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended the stream."""
        return not self._reader.is_alive()

    def cancel(self) -> None:
        """Cancel the call, like a client that disconnects."""
        self._call.cancel()

    def join(self, timeout_s: float = 120) -> Outcome:
        """Wait until the server has ended the stream; return everything received."""
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), "the stream did not end"
        self._channel.close()
        return self.outcome

    def _read(self) -> None:
        try:
            for message in self._call:
                self.outcome.take(message)
                self.got_response.set()
        except grpc.RpcError as error:
            self.outcome.call_error = str(error.code())


class SharedStream:
    """Several requests on one stream, each with an id of its own, from which its answers are told."""

    def __init__(self, url: str, requests: dict[str, tuple[str, dict[str, Any]]]) -> None:
        """Send the requests: id → model and inputs."""
        self._channel = grpc.insecure_channel(url)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.outcomes = {request_id: Outcome() for request_id in requests}
        self.call_error = ""
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for request_id, (model, inputs) in requests.items():
            self._sent.put(build_request(model, inputs, request_id=request_id))
        self._call = stub.ModelStreamInfer(iter(self._sent.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def join(self, timeout_s: float = 120) -> dict[str, Outcome]:
        """Send no more, and wait until the server has ended the stream; return what each request got."""
        self._sent.put(None)
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), "the stream did not end"
        self._channel.close()
        return self.outcomes

    def _read(self) -> None:
        try:
            for message in self._call:
                self.outcomes[message.infer_response.id].take(message)
        except grpc.RpcError as error:
            self.call_error = str(error.code())


def build_request(model: str, inputs: dict[str, Any], **request: Any) -> Any:
    """A ModelInferRequest with raw tensors; scalars become [1, 1]."""
    message = service_pb2.ModelInferRequest(
        model_name=model, model_version=request.get("model_version", ""), id=request.get("request_id", "")
    )
    for name, value in inputs.items():
        array = as_tensor(value)
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        message.inputs.append(tensor._get_tensor())
        message.raw_input_contents.append(tensor._get_content())
    for key, value in (request.get("parameters", {}) | _BOOL_PARAMETERS).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[
            type(value)
        ]
        setattr(message.parameters[key], kind, value)
    if "timeout" in request:
        message.parameters["timeout"].int64_param = request["timeout"]
    return message


def as_tensor(value: Any) -> Any:
    """A [1, n] tensor of the type clients use: ints INT32, floats FP32, text BYTES."""
    if isinstance(value, np.ndarray):
        return value
    items = value if isinstance(value, list) else [value]
    first = items[0] if items else 0
    if isinstance(first, str):
        return np.array([[item.encode() for item in items]], dtype=np.object_)
    if isinstance(first, bytes):
        return np.array([items], dtype=np.object_)
    kind = {bool: np.bool_, int: np.int32, float: np.float32}[type(first)]
    return np.array([items], dtype=kind)


def ask(url: str, model: str, inputs: dict[str, Any], **request: Any) -> Outcome:
    """Send a request and wait for its end."""
    return Stream(url, model, inputs, **request).join()


def llm_inputs(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """The inputs that a direct client of `llm` sends."""
    return {
        "input_ids": prompt,
        "input_lengths": len(prompt),
        "request_output_len": max_tokens,
        "streaming": True,
        "exclude_input_in_output": True,
        **more,
    }


def text_inputs(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The inputs that a client of `ensemble` sends."""
    return {
        "text_input": text,
        "max_tokens": max_tokens,
        "stream": True,
        "exclude_input_in_output": True,
        **more,
    }


def chunks(outcome: Outcome, name: str) -> Iterator[Any]:
    """The values of one output, from every response that has it."""
    return (response[name] for response in outcome.responses if name in response)
