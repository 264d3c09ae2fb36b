"""Messages of gRPC clients: what passes, and what is refused before anything is made of it."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from naiad.gate import grpc_messages
from naiad.gate.grpc_messages import check_infer_request, error_in_stream
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError

LIMITS = Limits()


def request(num_inputs: int) -> bytes:
    asked = service_pb2.ModelInferRequest(model_name="llm", id="a request")
    for number in range(num_inputs):
        asked.inputs.add(name=f"input {number}", datatype="INT32", shape=[1, 1])
        asked.raw_input_contents.append(bytes(4))
    asked.parameters["timeout"].int64_param = 5
    return bytes(asked.SerializeToString())


def test_a_message_with_as_many_tensors_as_are_allowed_passes() -> None:
    check_infer_request(request(LIMITS.max_tensors), LIMITS)
    with pytest.raises(RefusedError, match="257 inputs: expected at most 256"):
        check_infer_request(request(LIMITS.max_tensors + 1), LIMITS)


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x22\x00", b"\x32\x00", b"\x3a\x00", b"\x98\x06\x01"])
def test_millions_of_empty_fields_are_refused_unparsed(field: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each is an object of some hundred bytes, once it is parsed.
    monkeypatch.setattr(grpc_messages, "service_pb2", Unparsed)
    with pytest.raises(RefusedError, match="the message has more than 1024 fields"):
        check_infer_request(field * 2_000_000, LIMITS)
    assert b"refused" in error_in_stream(field * 2_000_000, "refused")


@pytest.mark.parametrize(
    "field", [b"\x22\x05\x0a\x03abc", b"\x18\x01", b"\x98\x06\x01"], ids=["parameter", "shape", "unknown"]
)
@pytest.mark.parametrize("tensors", [b"\x2a", b"\x32"], ids=["inputs", "outputs"])
def test_thousands_of_fields_in_tensors_are_refused_unparsed(
    field: bytes, tensors: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = field * 2_049
    two = (tensors + encoded(len(tensor)) + tensor) * 2
    monkeypatch.setattr(grpc_messages, "service_pb2", Unparsed)
    with pytest.raises(RefusedError, match="inputs and outputs have more than 4096 fields"):
        check_infer_request(two, LIMITS)


def test_a_tensor_with_a_few_parameters_passes() -> None:
    asked = service_pb2.ModelInferRequest(model_name="llm")
    for number in range(LIMITS.max_tensors):
        tensor = asked.inputs.add(name=f"input {number}", datatype="INT32", shape=[1] * 8)
        tensor.contents.int_contents.append(1)
        for name in ("a", "b"):
            tensor.parameters[name].int64_param = 1
    check_infer_request(asked.SerializeToString(), LIMITS)


def encoded(number: int) -> bytes:
    """A number as protobuf writes it."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


class Unparsed:
    """In place of the messages' module: it parses no request."""

    ModelInferRequest = None
    ModelStreamInferResponse = service_pb2.ModelStreamInferResponse


def test_a_damaged_message_is_refused_if_the_parser_refuses_it() -> None:
    draw, whole, num_refused, num_stricter = random.Random(5), request(3), 0, 0
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        raw = raw[: draw.randrange(len(raw) + 1)]
        try:
            check_infer_request(bytes(raw), LIMITS)
        except RefusedError as refusal:
            num_refused += 1
            num_stricter += str(refusal).endswith("no ModelInferRequest") and is_message(bytes(raw))
        else:
            assert is_message(bytes(raw))
    assert num_refused > 300
    # Those with a group of protobuf, which no client of Triton sends.
    assert num_stricter <= 30


def is_message(raw: bytes) -> bool:
    try:
        service_pb2.ModelInferRequest.FromString(raw)
    except DecodeError:
        return False
    return True
