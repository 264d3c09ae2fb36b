"""Triton's gRPC streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from naiad_client.errors import ServerError
from naiad_client.generation import Answer, Chunk, Generation
from naiad_client.wire import TensorValue, build_request, is_final, read_int, read_text

# Echoed prompts may be longer than gRPC's default limit of 4 MiB.
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


class GRPCDoor:
    """Starts generations on one channel."""

    def __init__(self, url: str) -> None:
        """Prepare a channel to HOST:PORT; it connects on first use."""
        self.url = url
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def start(self, model: str, tensors: Mapping[str, TensorValue | None], request_id: str) -> Generation:
        """Send a request.

        Raises:
            ValueError: a value does not fit its tensor's type.
        """
        call = self._stub.ModelStreamInfer(iter([build_request(model, tensors, request_id)]))
        return Generation(_answers(call, self.url), call.cancel)

    def close(self) -> None:
        """Close the channel; running generations end with an error."""
        self._channel.close()


def _answers(call: Any, url: str) -> Iterator[Answer]:
    try:
        for message in call:
            if message.error_message:
                raise ServerError(message.error_message)
            response = message.infer_response
            yield (_chunk(response) if response.outputs else None), is_final(response)
    except grpc.RpcError as error:
        raise _call_error(error, url) from None


def _chunk(response: Any) -> Chunk:
    return Chunk(
        text=read_text(response, "text_output") or "",
        finish_reason=read_text(response, "finish_reason") or None,
        num_output_tokens=read_int(response, "num_output_tokens") or 0,
        num_input_tokens=read_int(response, "num_input_tokens") or 0,
    )


def _call_error(error: Any, url: str) -> ServerError:
    status = error.code()
    if status is grpc.StatusCode.UNAVAILABLE:
        return ServerError(f"no server can be reached at {url}: {error.details()}", status.name)
    return ServerError(error.details() or status.name, status.name)
