"""Checks the messages of gRPC clients; what passes is sent on as it came."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from naiad.gate.limits import Limits
from naiad.gate.parameters import check_input_parameters, check_output_parameters, check_request_parameters
from naiad.gate.refusal import RefusedError
from naiad.gate.shapes import MAX_DIMENSIONS, check_shapes

_MAX_NAME = 1024
# Inputs, their contents, outputs and parameters: each is a field of the message.
_MAX_FIELDS = 1024
# Names, shapes, parameters and contents of all inputs and outputs.
_MAX_TENSOR_FIELDS = 4096
_INPUTS, _OUTPUTS = 5, 6
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED_64, _SIZED, _FIXED_32 = 0, 1, 2, 5
_NO_REQUEST = "the message is no ModelInferRequest"


def check_infer_request(raw: bytes, limits: Limits) -> None:
    """Check a `ModelInferRequest`.

    Raises:
        RefusedError: it does not pass.
    """
    request = _parsed(raw)
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
    check_shapes(((tensor.name, tensor.shape[: MAX_DIMENSIONS + 1]) for tensor in request.inputs), len(raw))
    for tensor in request.outputs:
        check_output_parameters(tensor.parameters)


def _parsed(raw: bytes) -> Any:
    """Parse a `ModelInferRequest`.

    Raises:
        RefusedError: it is none, or it has too many fields.
    """
    _check_num_fields(raw)
    try:
        return service_pb2.ModelInferRequest.FromString(raw)
    except DecodeError:
        raise RefusedError(400, _NO_REQUEST) from None


def _check_num_fields(raw: bytes) -> None:
    """Check how many fields a message has before objects are made of them: two bytes are enough for one.

    Raises:
        RefusedError: it or its tensors have too many, or it is no message.
    """
    num_tensor_fields = 0
    for num_fields, (number, content) in enumerate(_fields(memoryview(raw)), 1):
        if num_fields > _MAX_FIELDS:
            raise RefusedError(400, f"the message has more than {_MAX_FIELDS} fields")
        if number not in (_INPUTS, _OUTPUTS):
            continue
        for _ in _fields(content):
            num_tensor_fields += 1
            if num_tensor_fields > _MAX_TENSOR_FIELDS:
                raise RefusedError(400, f"inputs and outputs have more than {_MAX_TENSOR_FIELDS} fields")


def _fields(raw: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number of each field of a message, and the bytes of a field that has a length.

    Raises:
        RefusedError: it is no message.
    """
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        kind, begin = tag & 7, at
        if kind == _VARINT:
            _, at = _varint(raw, at)
        elif kind == _SIZED:
            size, begin = _varint(raw, at)
            at = begin + size
        elif kind in (_FIXED_64, _FIXED_32):
            at += 8 if kind == _FIXED_64 else 4
        else:
            raise RefusedError(400, _NO_REQUEST)
        if at > len(raw):
            raise RefusedError(400, _NO_REQUEST)
        yield tag >> 3, raw[begin:at] if kind == _SIZED else raw[:0]


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    """Read a number of protobuf; return it and where it ends."""
    value = 0
    for index, byte in enumerate(raw[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise RefusedError(400, _NO_REQUEST)


def error_in_stream(raw: bytes, message: str) -> bytes:
    """Return the message of a stream that refuses one of its requests, as Triton writes it."""
    answer = service_pb2.ModelStreamInferResponse(error_message=message)
    with contextlib.suppress(RefusedError):
        request = _parsed(raw)
        answer.infer_response.id = request.id[:_MAX_NAME]
        answer.infer_response.model_name = request.model_name[:_MAX_NAME]
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    return bytes(answer.SerializeToString())
