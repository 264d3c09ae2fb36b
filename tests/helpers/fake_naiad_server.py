"""A gRPC server that records requests and sends made-up answers in the ensemble's form."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tritonclient.grpc import service_pb2, service_pb2_grpc

Answer = Callable[[Any, Any], Iterator[Any]]


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.answer: Answer = lambda request, context: iter(())
        self.was_cancelled = threading.Event()
        self.url = ""

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        context.add_callback(self.was_cancelled.set)
        for request in request_iterator:
            self.requests.append(request)
            yield from self.answer(request, context)

    def sent(self) -> dict[str, tuple[str, list[int], bytes]]:
        request = self.requests[-1]
        return {
            tensor.name: (tensor.datatype, list(tensor.shape), content)
            for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
        }


def response(text: str | None = None, *, final: bool = False, finish: str = "", tokens: int = 1) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    answer = message.infer_response
    answer.parameters["triton_final_response"].bool_param = final
    if text is not None:
        raws = {"text_output": text.encode(), "finish_reason": finish.encode()}
        for name, raw in raws.items():
            answer.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
            answer.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
        for name, value in (("num_output_tokens", tokens), ("num_input_tokens", 5)):
            answer.outputs.add(name=name, datatype="INT32", shape=[1, 1])
            answer.raw_output_contents.append(struct.pack("<i", value))
    return message


def words(*texts: str) -> Answer:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        for text in texts[:-1]:
            yield response(text)
        yield response(texts[-1], finish="stop")
        yield response(final=True)

    return answer


def failure(message: str) -> Answer:
    return lambda request, context: iter([service_pb2.ModelStreamInferResponse(error_message=message)])
