from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from helpers.fake_naiad_server import FakeServer
from naiad_client import Client


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    host = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, host)
    fake.url = f"127.0.0.1:{host.add_insecure_port('127.0.0.1:0')}"
    host.start()
    yield fake
    host.stop(grace=None).wait()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made
