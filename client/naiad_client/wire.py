"""Builds requests and reads responses, without a connection."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tritonclient.grpc import service_pb2


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


TensorValue = str | bool | int | float | Sequence[str]

# Tensors whose datatype does not follow from the Python type.
_UINT64_TENSORS = frozenset({"seed"})
_FLOAT_TENSORS = frozenset(
    {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
)


def build_request(model: str, tensors: Mapping[str, TensorValue | None], request_id: str = "") -> Any:
    """Build a request of one row; each tensor is [1, n].

    Args:
        model: the model's name.
        tensors: name → value; None = not sent.
        request_id: chosen by the caller; "" = none.

    Returns:
        A `ModelInferRequest` that asks for an empty final response.

    Raises:
        ValueError: a value does not fit its tensor's type; names the tensor.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in tensors.items():
        if value is None:
            continue
        datatype, count, content = _encode(name, value)
        request.inputs.add(name=name, datatype=datatype, shape=[1, count])
        request.raw_input_contents.append(content)
    return request


def checked_values(tensors: Mapping[str, TensorValue | None]) -> dict[str, Any]:
    """Return the values that are to be sent, as JSON can hold them.

    Raises:
        ValueError: a value does not fit its tensor's type; names the tensor.
    """
    values: dict[str, Any] = {}
    for name, value in tensors.items():
        if value is not None:
            _encode(name, value)
            values[name] = float(value) if name in _FLOAT_TENSORS and isinstance(value, int) else value
    return values


def encode_messages(messages: Sequence[Message]) -> str:
    """Return a chat in the JSON format of the `messages` tensor."""
    return json.dumps(list(messages), ensure_ascii=False)


def is_final(response: Any) -> bool:
    """Whether a `ModelInferResponse` is the last one of its request."""
    parameters = response.parameters
    return "triton_final_response" in parameters and bool(parameters["triton_final_response"].bool_param)


def read_text(response: Any, name: str) -> str | None:
    """Return the joined strings of a BYTES output; None if the response lacks it."""
    content = _content(response, name)
    if content is None:
        return None
    parts, offset = [], 0
    while offset < len(content):
        (length,) = struct.unpack_from("<I", content, offset)
        parts.append(content[offset + 4 : offset + 4 + length])
        offset += 4 + length
    return b"".join(parts).decode("utf-8", errors="replace")


def read_int(response: Any, name: str) -> int | None:
    """Return the first value of an INT32 or UINT32 output; None if the response lacks it."""
    content = _content(response, name)
    return None if not content else int.from_bytes(content[:4], "little", signed=True)


def _content(response: Any, name: str) -> bytes | None:
    for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == name:
            return bytes(content)
    return None


def _encode(name: str, value: TensorValue) -> tuple[str, int, bytes]:
    if isinstance(value, bool):
        return "BOOL", 1, struct.pack("<?", value)
    try:
        if name in _UINT64_TENSORS:
            return "UINT64", 1, struct.pack("<Q", value)
        if name in _FLOAT_TENSORS:
            return "FP32", 1, struct.pack("<f", value)
        if isinstance(value, int):
            return "INT32", 1, struct.pack("<i", value)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{name} = {value!r} does not fit its tensor: {error}") from None
    if isinstance(value, float):
        raise ValueError(f"{name} = {value!r}: expected a whole number")
    words = [value] if isinstance(value, str) else list(value)
    return "BYTES", len(words), b"".join(_length_prefixed(word) for word in words)


def _length_prefixed(word: str) -> bytes:
    raw = word.encode()
    return struct.pack("<I", len(raw)) + raw
