"""gRPC statuses of unary calls, and of streams that request them with the header triton_grpc_error.

Release 24.10 may crash, with any model, when the error of such a stream comes within milliseconds of its
request. So these tests check immediate refusals of streams in band, and use the header only for later errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from helpers.bad_requests import BAD
from helpers.preset_server import Tensors, infer, write_presets
from helpers.raw_grpc import Stream, ask, build_request, llm_inputs, text_inputs
from helpers.server import Leaving, Server, eventually, running

SLOTS, QUEUE = 2, 2
LONG = 4000
HEADER = (("triton_grpc_error", "true"),)
LLM_OF = {False: "llm", True: "unary_tensorrt_llm"}
STREAMED = ("llm", "text", "ensemble", "vllm_model")
UNARY = ("unary_tensorrt_llm", "unary_tensorrt_llm_bls", "unary_ensemble")
FRONTENDS = STREAMED + UNARY
# Status and message of a call; OK has no message.
Status = tuple[str, str]
OK: Status = ("OK", "")
FULL = "Exceeds maximum queue size, the queue is full: 4 sequences run or wait, at most 4 may"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, leaving: Leaving) -> Iterator[Server]:
    # Torch is slow enough for requests that occupy all slots to last.
    options = ("--max-num-seqs", str(SLOTS), "--max-queued-requests", str(QUEUE), "--cpu-kernels", "torch")
    with running(leaving, write_presets(tmp_path_factory.mktemp("statuses"), *options)) as server:
        yield server


@pytest.fixture(autouse=True)
def _idle(narrow: Server) -> None:
    eventually(lambda: all(gauge(narrow, is_unary, "active") == 0 for is_unary in LLM_OF))


def gauge(server: Server, is_unary: bool, request_type: str) -> float:
    return server.metric("nv_trt_llm_request_metrics", request_type=request_type, model=LLM_OF[is_unary])


def inputs_of(frontend: str, num_tokens: int) -> Tensors:
    """Inputs for a request of this many tokens, which also asks for the finish reason where possible."""
    if frontend == "vllm_model":
        sampling = json.dumps({"max_tokens": num_tokens, "ignore_eos": True})
        return {
            "text_input": np.array([b"Once"], dtype=np.object_),
            "stream": np.array([True]),
            "sampling_parameters": np.array([sampling.encode()], dtype=np.object_),
        }
    fields = {"ignore_eos": True, "return_finish_reason": True}
    if frontend.endswith("llm"):
        return llm_inputs([5, 6, 7], num_tokens, **fields) | {"streaming": frontend not in UNARY}
    return text_inputs("Once", num_tokens, **fields) | {"stream": frontend not in UNARY}


def status_of(server: Server, frontend: str, inputs: Tensors, **request: Any) -> Status:
    return (status_of_call if frontend in UNARY else status_of_stream)(server, frontend, inputs, **request)


def status_of_call(server: Server, model: str, inputs: Tensors, **request: Any) -> Status:
    try:
        infer(server, model, inputs, **request)
    except InferenceServerException as error:
        return error.status().removeprefix("StatusCode."), error.message()
    return OK


def status_of_stream(
    server: Server,
    model: str,
    inputs: Tensors,
    on_response: Callable[[], None] = lambda: None,
    **request: Any,
) -> Status:
    """Send a stream with the header; `on_response` is called for each response before an error."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            for message in stub.ModelStreamInfer(
                iter([build_request(model, inputs, **request)]), metadata=HEADER
            ):
                assert message.error_message == "", "an error in band"
                on_response()
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return OK


def stop(server: Server, is_unary: bool, request_id: str) -> None:
    model = LLM_OF[is_unary]
    order = ask(server.grpc, model, llm_inputs([1], 1, stop=True, streaming=False), request_id=request_id)
    assert (order.errors, order.responses, order.num_finals) == ([], [], 1)


def fill(server: Server, is_unary: bool, num_requests: int) -> list[Stream]:
    """Start requests with the id "fill", which run or wait until they are stopped."""
    model = LLM_OF[is_unary]
    inputs = llm_inputs([5, 6, 7], LONG, ignore_eos=True, streaming=False)
    streams = [Stream(server.grpc, model, inputs, request_id="fill") for _ in range(num_requests)]
    eventually(lambda: gauge(server, is_unary, "active") == num_requests)
    eventually(lambda: gauge(server, is_unary, "scheduled") == min(num_requests, SLOTS))
    return streams


def empty(server: Server, is_unary: bool, streams: list[Stream]) -> None:
    assert not any(stream.has_ended for stream in streams)
    stop(server, is_unary, "fill")
    assert [stream.join(30).errors for stream in streams] == [[]] * len(streams)


def refused(server: Server, model: str, inputs: Tensors) -> str:
    """Send a stream without the header; return its only error."""
    outcome = ask(server.grpc, model, inputs)
    assert (outcome.responses, outcome.num_finals, outcome.call_error) == ([], 1, "")
    (error,) = outcome.errors
    return error


@pytest.mark.parametrize("model", BAD)
def test_bad_input_is_an_invalid_argument(narrow: Server, model: str) -> None:
    inputs, expected = BAD[model]
    error = refused(narrow, model, inputs)
    assert expected in error
    if model.startswith("unary"):
        assert status_of_call(narrow, model, inputs) == ("INVALID_ARGUMENT", error)


@pytest.mark.parametrize("frontend", STREAMED)
def test_what_is_served_ends_a_stream_with_ok(narrow: Server, frontend: str) -> None:
    num_responses = []
    status = status_of_stream(narrow, frontend, inputs_of(frontend, 60), lambda: num_responses.append(1))
    assert status == OK
    assert len(num_responses) > 1


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_deadline_in_the_queue_is_unavailable(narrow: Server, frontend: str) -> None:
    is_unary = frontend in UNARY
    streams = fill(narrow, is_unary, SLOTS)
    code, message = status_of(narrow, frontend, inputs_of(frontend, 4), timeout=200_000)
    assert code == "UNAVAILABLE"
    assert "timeout: the request was not started within its time limit" in message
    assert message.startswith("Error generating stream: ") == (frontend == "vllm_model")
    eventually(lambda: gauge(narrow, is_unary, "active") == SLOTS)
    empty(narrow, is_unary, streams)


@pytest.mark.parametrize("way", ["generate", "generate_stream"])
@pytest.mark.parametrize("frontend", ["llm", "text", "vllm_model", "unary_tensorrt_llm_bls"])
def test_a_deadline_in_the_queue_over_http(narrow: Server, frontend: str, way: str) -> None:
    streams = fill(narrow, frontend in UNARY, SLOTS)
    status, text = narrow.post(f"/v2/models/{frontend}/{way}", http_body(frontend, 4) | {"timeout": 200_000})
    # The server has a single code for all errors of `generate`.
    assert status == 400
    assert "timeout: the request was not started within its time limit" in text
    empty(narrow, frontend in UNARY, streams)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_full_queue_is_unavailable(narrow: Server, frontend: str) -> None:
    streams = fill(narrow, frontend in UNARY, SLOTS + QUEUE)
    error = refused(narrow, frontend, inputs_of(frontend, 4))
    assert FULL in error
    if frontend in UNARY:
        assert status_of_call(narrow, frontend, inputs_of(frontend, 4)) == ("UNAVAILABLE", error)
    empty(narrow, frontend in UNARY, streams)
    assert status_of(narrow, frontend, inputs_of(frontend, 4)) == OK


def test_a_full_queue_over_http_infer_is_503(narrow: Server) -> None:
    streams = fill(narrow, True, SLOTS + QUEUE)
    ids = {"input_ids": 5, "input_lengths": 1, "request_output_len": 4}
    tensors = [
        {"name": name, "shape": [1, 1], "datatype": "INT32", "data": [value]} for name, value in ids.items()
    ]
    status, text = narrow.post("/v2/models/unary_tensorrt_llm/infer", {"inputs": tensors})
    assert status == 503
    assert FULL in json.loads(text)["error"]
    empty(narrow, True, streams)


@pytest.mark.parametrize("frontend", STREAMED)
def test_a_stopped_stream_is_cancelled_in_vllms_shape_only(narrow: Server, frontend: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        num_responses: list[int] = []
        asked = pool.submit(
            status_of_stream,
            narrow,
            frontend,
            inputs_of(frontend, LONG),
            lambda: num_responses.append(1),
            request_id="stop-me",
        )
        eventually(lambda: len(num_responses) > 0)
        stop(narrow, False, "stop-me")
        expected = ("CANCELLED", "Request was cancelled") if frontend == "vllm_model" else OK
        assert asked.result(30) == expected
    assert len(num_responses) < LONG


def test_a_stopped_request_of_vllms_shape_is_cancelled_in_the_queue_too(narrow: Server) -> None:
    streams = fill(narrow, False, SLOTS)
    with ThreadPoolExecutor(1) as pool:
        unstreamed = inputs_of("vllm_model", 4) | {"stream": np.array([False])}
        asked = pool.submit(status_of_stream, narrow, "vllm_model", unstreamed, request_id="stop-me")
        eventually(lambda: gauge(narrow, False, "waiting") == 1)
        stop(narrow, False, "stop-me")
        assert asked.result(30) == ("CANCELLED", "Request was cancelled")
    empty(narrow, False, streams)


def http_body(frontend: str, num_tokens: int) -> dict[str, Any]:
    requested: dict[str, Any] = {"ignore_eos": True}
    if frontend != "vllm_model":
        requested |= {"exclude_input_in_output": True, "return_finish_reason": True}
    if frontend in ("llm", "unary_tensorrt_llm"):
        return {
            "input_ids": [5, 6, 7],
            "input_lengths": 3,
            "request_output_len": num_tokens,
            **requested,
        }
    return {"text_input": "Once", "max_tokens": num_tokens, **requested}


def order_by_http(server: Server, is_unary: bool, asked: str) -> tuple[int, str]:
    """Send a stop request with no fields other than the required ones."""
    model = {"llm": LLM_OF[is_unary], "text": "unary_tensorrt_llm_bls" if is_unary else "text"}[asked]
    ids = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
    # `generate` expects exactly one response, but a stop request to a decoupled model has none.
    way = "generate" if is_unary else "generate_stream"
    body = {"id": "stop-me", "stop": True} | (ids if asked == "llm" else {})
    return server.post(f"/v2/models/{model}/{way}", body)


@pytest.mark.parametrize("asked", ["llm", "text"])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_stop_over_http_ends_a_running_generate(narrow: Server, frontend: str, asked: str) -> None:
    is_unary = frontend in UNARY
    with ThreadPoolExecutor(2) as pool:
        path = f"/v2/models/{frontend}/generate"
        stopped, other = (
            pool.submit(narrow.post, path, http_body(frontend, LONG) | {"id": request_id})
            for request_id in ("stop-me", "fill")
        )
        eventually(lambda: gauge(narrow, is_unary, "scheduled") == 2)
        status, text = order_by_http(narrow, is_unary, asked)
        assert status == 200
        assert "error" not in text
        check_stopped(frontend, stopped)
        if other.done():
            # On a fast machine it may have come to its end meanwhile.
            check_whole(frontend, other)
        else:
            stop(narrow, is_unary, "fill")
            check_stopped(frontend, other)


def check_whole(frontend: str, request: Future[tuple[int, str]]) -> None:
    status, text = request.result()
    reason = None if frontend == "vllm_model" else "length"
    assert (status, json.loads(text).get("finish_reason")) == (200, reason)


def check_stopped(frontend: str, request: Future[tuple[int, str]]) -> None:
    status, text = request.result(30)
    answer = json.loads(text)
    if frontend == "vllm_model":
        assert (status, answer) == (400, {"error": "Request was cancelled"})
    else:
        assert (status, answer["finish_reason"]) == (200, "cancelled")


def test_a_lost_engine_is_internal_for_running_requests(narrow: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        num_responses: list[int] = []
        asked = pool.submit(
            status_of_stream, narrow, "text", inputs_of("text", LONG), lambda: num_responses.append(1)
        )
        eventually(lambda: len(num_responses) > 0)
        for process in narrow.processes("naiad.engine_process"):
            process.kill()
        code, message = asked.result(30)
    assert code == "INTERNAL"
    assert "the engine process ended" in message
    for frontend in FRONTENDS:
        eventually(
            lambda frontend=frontend: ask(narrow.grpc, frontend, inputs_of(frontend, 4)).errors == [], 60
        )
