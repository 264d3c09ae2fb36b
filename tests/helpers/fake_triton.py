"""A gRPC server that has the shipped models' configurations, and answers streams with what a test says."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import ModelConfig

_REPOSITORY = Path(__file__).parents[2] / "model_repository"


def shipped_config(name: str) -> Any:
    """The configuration of a shipped model."""
    return text_format.Parse((_REPOSITORY / name / "config.pbtxt").read_text(), ModelConfig())


def response(request_id: str = "", error: str = "", **tensors: str | int) -> Any:
    """A response of a stream: text is a string tensor, a number an int32 one, each with one value."""
    made = service_pb2.ModelStreamInferResponse(error_message=error)
    made.infer_response.id = request_id
    for name, value in tensors.items():
        raw = value.encode() if isinstance(value, str) else struct.pack("<i", value)
        if isinstance(value, str):
            raw = struct.pack("<I", len(raw)) + raw
        kind = "BYTES" if isinstance(value, str) else "INT32"
        made.infer_response.outputs.add(name=name, datatype=kind, shape=[1, 1])
        made.infer_response.raw_output_contents.append(raw)
    return made


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves the models in `configs` that are `ready`.

    Attributes:
        script: what each stream answers.
        is_held: streams stay open after that, until they are cancelled.
        breaks: streams fail with this status after that.
        requests: all requests of streams.
        metadata: the metadata of all streams.
        num_open: streams that are open.
        control: header and key without which it does not list its models.
        lists_models: whether anybody may ask for a list.
    """

    def __init__(self, *names: str) -> None:
        self.configs = {name: shipped_config(name) for name in names}
        self.ready = list(names)
        self.script: Sequence[Any] = ()
        self.is_held = False
        self.breaks: grpc.StatusCode | None = None
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.num_open = 0
        self.control: tuple[str, str] | None = None
        self.lists_models = True
        self.port = 0
        self._server: Any = None

    async def start(self) -> None:
        """Listen, after a stop on the same port as before."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """End all streams and close the port."""
        await self._server.stop(None)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name in self.ready)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not self.lists_models:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "is refused by the gate")
        if self.control is not None and self.control not in context.invocation_metadata():
            refusal = f"This protocol is restricted, expecting header '{self.control[0]}'"
            await context.abort(grpc.StatusCode.UNAVAILABLE, refusal)
        answer = service_pb2.RepositoryIndexResponse()
        for name in self.configs:
            answer.models.add(name=name, state="READY" if name in self.ready else "UNAVAILABLE")
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in self.configs:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        return service_pb2.ModelConfigResponse(config=self.configs[request.name])

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        self.num_open += 1
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for request in requests:
                self.requests.append(request)
            for each in self.script:
                yield each
            if self.breaks is not None:
                await context.abort(self.breaks, "broken")
            if self.is_held:
                await asyncio.sleep(600)
        finally:
            self.num_open -= 1
