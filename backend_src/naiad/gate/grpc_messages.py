"""Checks the messages of gRPC clients; what passes is sent on as it came."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from naiad.gate.limits import Limits
from naiad.gate.parameters import check_input_parameters, check_output_parameters, check_request_parameters
from naiad.gate.refusal import RefusedError

_MAX_DIMENSIONS = 8
_MAX_NAME = 1024


def check_infer_request(raw: bytes, limits: Limits) -> None:
    """Check a `ModelInferRequest`.

    Raises:
        RefusedError: it does not pass.
    """
    try:
        request = service_pb2.ModelInferRequest.FromString(raw)
    except DecodeError:
        raise RefusedError(400, "the message is no ModelInferRequest") from None
    check_request_parameters(request.parameters)
    for kind, tensors in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(tensors) > limits.max_tensors:
            raise RefusedError(400, f"{len(tensors)} {kind}: expected at most {limits.max_tensors}")
    if max(len(request.model_name), len(request.model_version), len(request.id)) > _MAX_NAME:
        raise RefusedError(
            400, f"the model's name, version or the id: expected at most {_MAX_NAME} characters"
        )
    for tensor in request.inputs:
        check_input_parameters(tensor.parameters)
        if len(tensor.shape) > _MAX_DIMENSIONS:
            raise RefusedError(
                400, f"an input has {len(tensor.shape)} dimensions: expected at most {_MAX_DIMENSIONS}"
            )
    for tensor in request.outputs:
        check_output_parameters(tensor.parameters)


def error_in_stream(raw: bytes, message: str) -> bytes:
    """Return the message of a stream that refuses one of its requests, as Triton writes it."""
    answer = service_pb2.ModelStreamInferResponse(error_message=message)
    with contextlib.suppress(DecodeError):
        request = service_pb2.ModelInferRequest.FromString(raw)
        answer.infer_response.id = request.id[:_MAX_NAME]
        answer.infer_response.model_name = request.model_name[:_MAX_NAME]
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    return bytes(answer.SerializeToString())
