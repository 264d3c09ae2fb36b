"""Clients that read nothing of long answers, as many as hold every slot and some that wait for one."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from helpers.openai_api import COMPLETIONS, address, post
from helpers.prometheus import read_page
from helpers.raw_grpc import ENDLESS, build_request, text_inputs
from helpers.served import served
from helpers.server import Leaving, Server, eventually, running
from helpers.tiny_repository import create_repository

SLOTS, CROWD = 2, 4
# An answer is many times as long, and each part of it has the request's id or the tokens' log probs.
RECEIVED_BYTES = 4096
LONG_ID = "i" * 1000
# The client's library takes no more than this in advance.
GRPC_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", RECEIVED_BYTES))
# Many times what any step of the test takes.
PATIENCE_S = 120
OPTIONS = ("--gate", "on", "--openai-port", "0", "--slow-reader-s", "2")

Begin = Callable[[Server, contextlib.ExitStack], None]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, leaving: Leaving) -> Iterator[Server]:
    """A server with few slots, whose doors wait a short time for clients that do not read."""
    repository = tmp_path_factory.mktemp("small") / "repository"
    create_repository(repository, tiny_dir, "--kv-cache-bytes", "64000000", "--max-num-seqs", str(SLOTS))
    with running(leaving, repository, *OPTIONS) as server:
        yield server


def by_http(server: Server, opened: contextlib.ExitStack) -> None:
    body = {"id": LONG_ID, "text_input": "Once", "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    _send(opened, server.http, "/v2/models/ensemble/generate_stream", body)


def by_openai(server: Server, opened: contextlib.ExitStack) -> None:
    fields = {"model": "first", "prompt": "Once", "stream": True, "max_tokens": ENDLESS, "ignore_eos": True}
    body = {**fields, "logprobs": 5}
    _send(opened, address(server), COMPLETIONS, body)


def by_grpc(server: Server, opened: contextlib.ExitStack) -> None:
    channel = opened.enter_context(grpc.insecure_channel(server.grpc, GRPC_OPTIONS))
    requests: queue.SimpleQueue[object] = queue.SimpleQueue()
    requests.put(build_request("ensemble", text_inputs("Once", ENDLESS, ignore_eos=True), request_id=LONG_ID))
    # The answer's messages are read when the call is asked for the next one.
    call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests.get, None))
    opened.callback(requests.put, None)
    opened.callback(call.cancel)


def _send(opened: contextlib.ExitStack, where: str, path: str, body: dict[str, object]) -> None:
    """Send a request on a connection that takes little, and read nothing."""
    client = opened.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)
    host, port = where.rsplit(":", 1)
    client.connect((host, int(port)))
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {where}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    client.sendall(head.encode() + raw)


def have_come(server: Server, num_before: float) -> bool:
    """Whether the whole crowd runs, waits or has been given up since."""
    page = read_page(server.metrics_text())
    num_here = sum(page.values("vllm:num_requests_running") + page.values("vllm:num_requests_waiting"))
    num_ended = sum(page.values("vllm:request_success_total", finished_reason="abort"))
    return num_here + num_ended - num_before == CROWD


@pytest.mark.parametrize("begin", [by_http, by_grpc, by_openai])
def test_a_crowd_that_reads_nothing_gives_the_slots_back(small: Server, begin: Begin) -> None:
    num_before = small.num_aborted()
    with contextlib.ExitStack() as opened:
        for _ in range(CROWD):
            begin(small, opened)
        eventually(lambda: have_come(small, num_before), PATIENCE_S)
        # It waits behind all of them.
        assert served(small, "generate_stream", "Once", max_tokens=3, ignore_eos=True).pieces
        eventually(lambda: small.num_aborted() == num_before + CROWD, PATIENCE_S)
        eventually(lambda: small.used_blocks() == 0, PATIENCE_S)
        eventually(lambda: small.metric("vllm:num_requests_running") == 0, PATIENCE_S)
    status, _, _ = post(small, COMPLETIONS, {"model": "first", "prompt": "Once", "max_tokens": 3})
    assert status == 200
    assert small.num_aborted() == num_before + CROWD
