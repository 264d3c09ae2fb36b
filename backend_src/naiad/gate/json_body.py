"""Checks bodies of JSON, and writes them anew, so that the server cannot read them in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from naiad.gate.limits import Limits
from naiad.gate.parameters import check_input_parameters, check_output_parameters, check_request_parameters
from naiad.gate.refusal import RefusedError
from naiad.gate.shapes import check_shapes

_BINARY_SIZE = "binary_data_size"
_UNMARKED = bytes(set(range(256)) - set(b'"[{'))


def checked_json(body: bytes, limits: Limits) -> bytes:
    """Return an object of JSON, whose fields are tensors or parameters, written anew.

    Of keys that come twice the last one counts, for us and for the server.

    Raises:
        RefusedError: it is none, has too many lists and objects or is nested too deep, or has a parameter
            that does not pass.
    """
    request = _read(body, limits)
    check_request_parameters(request)
    parameters = request.get("parameters")
    if isinstance(parameters, dict):
        check_request_parameters(parameters)
    return _written(request)


def checked_inference(body: bytes, json_length: int | None, limits: Limits) -> tuple[bytes, int | None]:
    """Check a request of the inference protocol.

    Args:
        body: JSON, perhaps followed by the inputs' bytes.
        json_length: length of the JSON if bytes follow.
        limits: the limits.

    Returns:
        The body to send on, and the length of its JSON, if bytes follow it.

    Raises:
        RefusedError: it is malformed, or asks for what the gate does not let through.
    """
    if json_length == 0:
        text = "expected the length of the JSON; raw binary requests do not pass the gate"
        raise RefusedError(400, f"Inference-Header-Content-Length = 0: {text}")
    length = len(body) if json_length is None else json_length
    if length > len(body):
        raise RefusedError(400, f"Inference-Header-Content-Length = {length}: the body has {len(body)} bytes")
    request = _read(body[:length], limits)
    check_request_parameters(_object(request, "parameters"))
    num_bytes = 0
    inputs = _objects(request, "inputs", limits)
    check_shapes(((tensor.get("name"), tensor["shape"]) for tensor in inputs if "shape" in tensor), len(body))
    for tensor in inputs:
        parameters = _object(tensor, "parameters")
        check_input_parameters(parameters)
        num_bytes += _binary_size(parameters)
    for tensor in _objects(request, "outputs", limits):
        check_output_parameters(_object(tensor, "parameters"))
    if num_bytes != len(body) - length:
        raise RefusedError(
            400, f"{_BINARY_SIZE}: {num_bytes} bytes in all, but {len(body) - length} follow the JSON"
        )
    written = _written(request)
    return written + body[length:], None if json_length is None else len(written)


def _read(text: bytes, limits: Limits) -> dict[str, Any]:
    num_brackets = text.count(b"[") + text.count(b"{")
    # Prompts may hold as many brackets as they like.
    if num_brackets > limits.max_containers and _num_containers(text) > limits.max_containers:
        raise RefusedError(400, f"the JSON has more than {limits.max_containers} lists and objects")
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep(limits) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise RefusedError(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise RefusedError(400, "the body is no object of JSON")
    if num_brackets > limits.max_depth:
        _check_depth(value, limits.max_depth, limits)
    return value


def _num_containers(text: bytes) -> int:
    """Count the lists and objects of JSON, unread, in a time proportional to its length."""
    marks = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _UNMARKED)
    # Every second part is between two strings; strings without brackets are gone.
    return sum(map(len, marks.replace(b'""', b"").split(b'"')[::2]))


def _check_depth(value: dict[str, Any] | list[Any], allowed: int, limits: Limits) -> None:
    if allowed == 0:
        raise _too_deep(limits)
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (dict, list)):
            _check_depth(each, allowed - 1, limits)


def _too_deep(limits: Limits) -> RefusedError:
    return RefusedError(400, f"the JSON is nested too deep: expected at most {limits.max_depth} levels")


def _written(value: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (OverflowError, ValueError, msgspec.MsgspecError):
        raise RefusedError(400, "the body has a number that no tensor can hold") from None


def _object(request: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = request.get(key, {})
    if not isinstance(value, dict):
        raise RefusedError(400, f"{key}: expected an object")
    return value


def _objects(request: Mapping[str, Any], key: str, limits: Limits) -> list[Mapping[str, Any]]:
    value = request.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RefusedError(400, f"{key}: expected a list of objects")
    if len(value) > limits.max_tensors:
        raise RefusedError(400, f"{len(value)} {key}: expected at most {limits.max_tensors}")
    return value


def _binary_size(parameters: Mapping[str, Any]) -> int:
    size = parameters.get(_BINARY_SIZE, 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise RefusedError(400, f"{_BINARY_SIZE} = {str(size)[:40]}: expected a number of bytes")
    return size
