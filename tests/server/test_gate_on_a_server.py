"""A real server behind the gate: what passes is the same, and what kills release 24.10 does not reach it."""

from __future__ import annotations

import http.client
import json
import queue
import re
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2_grpc

from helpers.raw_grpc import ENDLESS, Stream, ask, build_request, llm_inputs, text_inputs
from helpers.served import WAYS, served
from helpers.server import Leaving, Server, eventually, gone, run_serve, running
from helpers.tiny_repository import create_repository

ROOMY = "64000000"
STREAM = "/v2/models/ensemble/generate_stream"


@dataclass
class Gated:
    """A server seen through the gate, and beside it."""

    through: Server
    beside: Server


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, leaving: Leaving) -> Iterator[Gated]:
    repository = tmp_path_factory.mktemp("gated") / "repository"
    create_repository(repository, tiny_dir, "--kv-cache-bytes", ROOMY)
    with running(leaving, repository, "--gate", "on") as server:
        yield Gated(server, beside(server))


def beside(server: Server) -> Server:
    """The same server by its own ports."""
    command = " ".join(tritonserver(server).cmdline())
    found = {name: re.search(rf"--{name}-port=(\d+)", command) for name in ("http", "grpc", "metrics")}
    addresses = {name: f"127.0.0.1:{match[1]}" for name, match in found.items() if match}
    return Server(server.process, **addresses)


def tritonserver(server: Server) -> Any:
    return next(each for each in server.processes("--model-repository") if each.name() == "tritonserver")


def port_of(address: str) -> int:
    """The port of HOST:PORT or of a URL."""
    found = re.search(r":(\d+)(?:/|$)", address)
    assert found, address
    return int(found[1])


def listeners(server: Server) -> set[tuple[str, int]]:
    """Host and port of every socket of all processes that takes TCP connections or datagrams."""
    first = psutil.Process(server.process.pid)
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for each in [first, *first.children(recursive=True)]
        for connection in each.net_connections("inet")
        if connection.status == "LISTEN" or connection.type == socket.SOCK_DGRAM
    }


def still_serves(gated: Gated, before: int) -> None:
    assert tritonserver(gated.through).pid == before
    assert (
        served(gated.through, "grpc", "Once", max_tokens=3).text
        == served(gated.beside, "grpc", "Once", max_tokens=3).text
    )


def answer_to(address: str, raw: bytes) -> bytes:
    """Send bytes, and return what comes until the connection is closed."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(raw)
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
        return b"".join(parts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7]])
def test_answers_are_the_same_through_the_gate_and_beside_it(
    gated: Gated, way: str, prompt: str | list[int]
) -> None:
    through, by_side = (
        served(server, way, prompt, max_tokens=40, ignore_eos=True)
        for server in (gated.through, gated.beside)
    )
    for name in ("text_output", "output_ids"):
        assert _joined(through.all(name)) == _joined(by_side.all(name))
    assert through.pieces


def _joined(values: list[Any]) -> Any:
    return "".join(values) if values and isinstance(values[0], str) else values


@pytest.mark.parametrize(
    "path", ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/llm", "/v2/models/ensemble/config"]
)
def test_pages_are_the_same_through_the_gate_and_beside_it(gated: Gated, path: str) -> None:
    def page(server: Server) -> tuple[int, bytes]:
        with urllib.request.urlopen(f"http://{server.http}{path}", timeout=30) as answer:
            return answer.status, answer.read()

    assert page(gated.through) == page(gated.beside)


def test_the_metrics_pass(gated: Gated) -> None:
    assert gated.through.used_blocks() == 0


def test_errors_of_models_pass(gated: Gated) -> None:
    body = {"text_input": "a", "max_tokens": -1}
    assert gated.through.post(STREAM, body) == gated.beside.post(STREAM, body)
    outcomes = [
        ask(server.grpc, "ensemble", text_inputs("a", -1)).errors for server in (gated.through, gated.beside)
    ]
    assert outcomes[0] == outcomes[1] != []


def test_tritons_http_client_works_through_the_gate(gated: Gated) -> None:
    """It sends tensors as bytes behind the JSON. `infer` serves the tokenizer, which is not decoupled."""

    def token_ids(server: Server) -> list[int]:
        client = triton_http.InferenceServerClient(server.http)
        assert client.is_server_ready()
        assert client.is_model_ready("tokenizer")
        assert client.get_model_metadata("tokenizer")["name"] == "tokenizer"
        text = triton_http.InferInput("QUERY", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([["Once upon a time"]], dtype=object))
        length = triton_http.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
        length.set_data_from_numpy(np.array([[3]], dtype=np.int32))
        ids: list[int] = client.infer("tokenizer", [text, length]).as_numpy("INPUT_ID").reshape(-1).tolist()
        return ids

    assert token_ids(gated.through) == token_ids(gated.beside) != []


def test_requests_that_kill_the_server_do_not_reach_it(gated: Gated) -> None:
    before = tritonserver(gated.through).pid
    deep = b"[" * 50_000 + b"]" * 50_000
    head = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: localhost\r\n"
    status = answer_to(gated.through.http, head + b"Content-Length: %d\r\n\r\n" % len(deep) + deep)
    assert status.startswith(b"HTTP/1.1 400 ")
    chunks = b"1\r\n[\r\n" * 600_000 + b"0\r\n\r\n"
    status = answer_to(gated.through.http, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert status.startswith(b"HTTP/1.1 413 ")
    body = {
        "inputs": [
            {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]},
            {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [1]},
        ],
        "outputs": [{"name": "text_context", "parameters": {"classification": 1}}],
    }
    code, text = gated.through.post("/v2/models/tokenizer/infer", body)
    assert (code, "class_count" in text) == (400, True)
    still_serves(gated, before)


def test_shapes_that_kill_the_server_do_not_reach_it(gated: Gated) -> None:
    before = tritonserver(gated.through).pid
    for shape in ([2**62, 1], [2**63 - 1, 1], [2**28, 1]):
        query = {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["hi"]}
        length = {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": shape, "data": [4]}
        code, text = gated.through.post("/v2/models/tokenizer/infer", {"inputs": [query, length]})
        assert (code, "REQUEST_OUTPUT_LEN has the shape" in text) == (400, True)
    request = build_request("llm", llm_inputs([5, 6, 7], 4))
    stop = request.inputs.add(name="stop_token_ids", datatype="INT32", shape=[1, 2**62 + 1])
    request.raw_input_contents.append(bytes(4))
    with grpc.insecure_channel(gated.through.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for shape in ([1, 2**62 + 1], [1, -1, -1]):
            stop.shape[:] = shape
            (answer,) = stub.ModelStreamInfer(iter([request]))
            assert "stop_token_ids has the shape" in answer.error_message
    still_serves(gated, before)


def test_classification_over_grpc_does_not_reach_the_server(gated: Gated) -> None:
    before = tritonserver(gated.through).pid
    message = build_request("ensemble", text_inputs("Once", 3))
    message.outputs.add(name="text_output").parameters["classification"].int64_param = 1
    with grpc.insecure_channel(gated.through.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (answer,) = stub.ModelStreamInfer(iter([message]), timeout=60)
        assert "class_count" in answer.error_message
        with pytest.raises(grpc.RpcError) as failed:
            list(
                stub.ModelStreamInfer(iter([message]), metadata=(("triton_grpc_error", "true"),), timeout=60)
            )
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    still_serves(gated, before)


@pytest.mark.parametrize("model", ["llm", "ensemble"])
def test_a_cancel_through_the_gate_reaches_the_engine(gated: Gated, model: str) -> None:
    server = gated.through
    inputs = llm_inputs([1, 2, 3], ENDLESS) if model == "llm" else text_inputs("Once", ENDLESS)
    num_before = server.num_aborted()
    stream = Stream(server.grpc, model, inputs | {"ignore_eos": True})
    assert stream.got_response.wait(30)
    stream.cancel()
    eventually(lambda: server.used_blocks() == 0)
    eventually(lambda: server.num_aborted() == num_before + 1)


def test_a_disconnect_through_the_gate_reaches_the_engine(gated: Gated) -> None:
    server = gated.through
    num_before = server.num_aborted()
    connection = http.client.HTTPConnection(server.http, timeout=30)
    body = {"text_input": "Once", "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    connection.request("POST", STREAM, json.dumps(body))
    connection.getresponse().read(20)
    connection.close()
    eventually(lambda: server.num_aborted() == num_before + 1)
    eventually(lambda: server.used_blocks() == 0)


def test_a_killed_gate_comes_back_and_the_server_stays(gated: Gated) -> None:
    server = gated.through
    before = tritonserver(server).pid
    inputs = text_inputs("Once upon a time", 400, ignore_eos=True)
    undisturbed = ask(gated.beside.grpc, "ensemble", inputs).text
    other = Stream(gated.beside.grpc, "ensemble", inputs)
    lost = Stream(server.grpc, "ensemble", text_inputs("Once", ENDLESS, ignore_eos=True))
    assert lost.got_response.wait(30)
    (gate,) = server.processes("naiad.gate")
    gate.kill()
    assert lost.join().call_error == "StatusCode.UNAVAILABLE"
    assert other.join().text == undisturbed

    def is_back() -> bool:
        try:
            return ask(server.grpc, "ensemble", text_inputs("Once", 3)).num_finals == 1
        except grpc.RpcError:
            return False

    eventually(is_back)
    eventually(lambda: server.used_blocks() == 0)
    still_serves(gated, before)
    eventually(lambda: any("restarting the gate" in line for line in server.lines))


def test_the_server_listens_on_loopback_alone_and_the_gate_stops_with_it(
    tmp_path: Path, tiny_dir: Path, leaving: Leaving
) -> None:
    create_repository(tmp_path / "repository", tiny_dir)
    # An address of loopback that nothing has by itself stands for one that others can reach.
    options = ("--host", "127.0.0.2", "--gate", "on", "--openai-port", "0")
    with running(leaving, tmp_path / "repository", *options) as server:
        found = listeners(server)
        # Only what clients are told has that address; the host of the OpenAI API is an option of its own.
        exposed = {port for host, port in found if host != "127.0.0.1"}
        assert exposed == {port_of(each) for each in (server.http, server.grpc, server.metrics)}
        assert ("127.0.0.1", port_of(server.openai)) in found
        hosts = {
            connection.laddr.ip.removeprefix("::ffff:")
            for connection in tritonserver(server).net_connections()
            if connection.status == "LISTEN"
        }
        assert hosts == {"127.0.0.1"}
        (gate,) = server.processes("naiad.gate")
        assert served(server, "generate_stream", "Once", max_tokens=3).pieces
        assert server.stop() == 0
        assert gone([gate])


def test_without_the_gate_the_bundled_server_is_not_exposed() -> None:
    code, output = run_serve(["--host", "0.0.0.0", "--gate", "off"])
    assert code == 1
    assert "--i-accept-known-holes" in output


# Of a stream that is reset after such a refusal release 24.10 keeps the connection for ever.
@pytest.mark.parametrize("leaves", ["cancels", "closes", "deadline"])
def test_clients_that_leave_after_a_refusal_cost_the_server_nothing(gated: Gated, leaves: str) -> None:
    server = tritonserver(gated.through)
    before = server.num_fds()
    request = build_request("no_such_model", llm_inputs([5], 1))
    for _ in range(60):
        with grpc.insecure_channel(gated.through.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stopped: queue.SimpleQueue[Any] = queue.SimpleQueue()
            stopped.put(request)
            call = stub.ModelStreamInfer(
                iter(stopped.get, None), timeout=0.5 if leaves == "deadline" else None
            )
            assert "no_such_model" in next(call).error_message
            if leaves == "cancels":
                call.cancel()
            elif leaves == "deadline":
                with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                    next(call)
        stopped.put(None)
    eventually(lambda: server.num_fds() < before + 10, 30)
    still_serves(gated, server.pid)
