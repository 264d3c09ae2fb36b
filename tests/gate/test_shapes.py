"""Shapes of inputs, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from naiad.gate.grpc_messages import check_infer_request
from naiad.gate.json_body import checked_inference
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError

Check = Callable[[list[Any]], None]


def over_http(shapes: list[Any]) -> None:
    inputs = [{"name": "a", "shape": shape, "datatype": "INT32", "data": [1, 2, 3]} for shape in shapes]
    checked_inference(json.dumps({"inputs": inputs}).encode(), None, Limits())


def over_grpc(shapes: list[Any]) -> None:
    request = service_pb2.ModelInferRequest(model_name="llm")
    for shape in shapes:
        request.inputs.add(name="a", datatype="INT32", shape=shape).contents.int_contents.append(1)
    check_infer_request(request.SerializeToString(), Limits())


BOTH = pytest.mark.parametrize("check", [over_http, over_grpc])


@BOTH
@pytest.mark.parametrize(
    "shape", [[], [1], [1, 3], [0], [1, 0], [1, 0, 5], [1, 0, 4096], [3, 1, 1, 1, 1, 1, 1, 1]]
)
def test_what_a_request_may_hold_passes(check: Check, shape: list[int]) -> None:
    check([shape])


@BOTH
@pytest.mark.parametrize(
    "shape",
    [
        # These kill tritonserver 24.10, or the process of a model.
        [2**62, 1],
        [2**63 - 1, 1],
        [2**61, 1],
        [1, 2**62 + 1],
        [1, 2**32, 2**32],
        [1, 0, 2**62],
        [1, 2**62, 0],
        [1, -2, -2],
        [-1],
        # This one only takes a gigabyte.
        [2**28, 1],
    ],
)
def test_more_values_than_the_request_has_bytes_do_not_pass(check: Check, shape: list[int]) -> None:
    with pytest.raises(RefusedError, match=r"the input a has the shape \[-?\d.*expected"):
        check([shape])


@BOTH
def test_inputs_are_counted_together(check: Check) -> None:
    check([[1, 10]])
    with pytest.raises(RefusedError, match="no more values than the request has bytes"):
        check([[1, 40]] * 200 + [[1, 10_000]])
    with pytest.raises(RefusedError, match="no more values than the request has bytes"):
        check([[1, 2000]] * 30)


@BOTH
def test_dimensions_are_limited(check: Check) -> None:
    with pytest.raises(RefusedError, match="the input a has 9 dimensions: expected at most 8"):
        check([[1] * 9])


@pytest.mark.parametrize(
    "shape", [3, "1", None, {"0": 1}, [1.0], [True], ["1"], [[1]], [None], [2**70], [1e99]]
)
def test_what_is_no_shape_does_not_pass(shape: Any) -> None:
    with pytest.raises(RefusedError, match="the input a has the shape"):
        over_http([shape])
