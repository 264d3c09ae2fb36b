"""A request that the server has forgotten keeps no engine and no metrics.

Release 24.10 forgets a request whose gRPC client cancels it after the model's last response and before that
response is written. The server does not finalize the model then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from helpers.model_control import control_client
from helpers.prometheus import read_page
from helpers.raw_grpc import ask, build_request, llm_inputs
from helpers.server import Server, eventually, start_repository
from helpers.tiny_repository import create_repository, tiny_checkpoint
from naiad.triton_server.service.retirement import RETIRE_AFTER_S

NUM_CLIENTS = 400
INPUTS = llm_inputs([5, 6, 7], 4, ignore_eos=True)


@dataclass(frozen=True)
class Served:
    """A server, its repository, a client that may load models, and the right answer."""

    server: Server
    repository: Path
    control: Any
    expected: list[int]


def leave_at_the_end(address: str) -> None:
    """Ask again and again, and cancel each request when its last response has come."""
    request = build_request("llm", INPUTS)
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(NUM_CLIENTS):
            call = stub.ModelStreamInfer(iter([request]))
            for message in call:
                if message.infer_response.parameters["triton_final_response"].bool_param:
                    break
            call.cancel()


def generated(server: Server) -> list[float]:
    """What the page of metrics says of the tokens of `llm`, once for each process that tells it."""
    page = read_page(server.metrics_text())
    return page.values("vllm:generation_tokens_total", model="llm", version="1")


def num_engines(server: Server) -> int:
    return len(server.processes("naiad.engine_process"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server under model control, some of whose requests it has forgotten."""
    repository, key_file = tmp_path / "repository", tmp_path / "key"
    create_repository(repository, tiny_checkpoint(tmp_path / "checkpoint"), "--max-num-seqs", "8")
    options = ("--model-control-mode", "explicit", "--model-control-key", str(key_file))
    server = start_repository("--model-repository", str(repository), *options)
    control = control_client(server.grpc, key_file)
    expected = ask(server.grpc, "llm", INPUTS).token_ids
    leave_at_the_end(server.grpc)
    yield Served(server, repository, control, expected)
    control.close()
    assert server.stop() == 0, "\n".join(server.lines[-40:])


def test_the_old_process_gives_up_its_engine(served: Served) -> None:
    # The server loads a model anew only if its files have changed.
    os.utime(served.repository / "llm" / "1" / "model.py")
    served.control.load_model("llm")
    assert ask(served.server.grpc, "llm", INPUTS).token_ids == served.expected
    eventually(lambda: num_engines(served.server) == 1, RETIRE_AFTER_S + 30)
    # The old process has given up the metrics, so the new one writes them.
    eventually(lambda: generated(served.server) == [4], 30)


def test_an_unloaded_model_gives_up_its_engine(served: Served) -> None:
    served.control.unload_model("llm")
    eventually(lambda: num_engines(served.server) == 0, RETIRE_AFTER_S + 30)
    eventually(lambda: generated(served.server) == [], 30)
    served.control.load_model("llm")
    # The new process stays, although nobody asks it for longer than a process rests that nobody needs.
    time.sleep(RETIRE_AFTER_S + 10)
    assert num_engines(served.server) == 1
    assert ask(served.server.grpc, "llm", INPUTS).token_ids == served.expected
