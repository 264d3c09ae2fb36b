from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.engine_harness import Recorder, fake_command
from naiad.config import EngineConfig
from naiad.engine_process import ClientTimings, EngineClient

MakeClient = Callable[..., tuple[EngineClient, Recorder]]


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory with a short path, because pytest's may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="naiad-test-") as name:
        yield Path(name)


@pytest.fixture
def make_client(socket_dir: Path) -> Iterator[MakeClient]:
    clients: list[EngineClient] = []

    def make(behaviour: str = "good", **timings: float) -> tuple[EngineClient, Recorder]:
        recorder = Recorder()
        client = EngineClient(
            EngineConfig(model_dir=str(socket_dir)),
            socket_dir / "llm.engine",
            recorder.on_outputs,
            recorder.on_lost,
            command=fake_command(behaviour),
            timings=ClientTimings(**timings),
        )
        clients.append(client)
        return client, recorder

    yield make
    for client in clients:
        client.close(timeout_s=0)


@pytest.fixture
def served(make_client: MakeClient) -> tuple[EngineClient, Recorder]:
    """A client whose engine is ready."""
    client, recorder = make_client()
    client.start()
    return client, recorder
