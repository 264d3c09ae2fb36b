from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from helpers.engine_harness import Recorder, fake_command, make_request
from helpers.fake_engine_child import HELD_ID, let_go
from naiad.cli.serve import drain
from naiad.cli.serve.drain import count_active, end_requests, num_active
from naiad.cli.serve.server_process import ServerProcess
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient

METRICS = """# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="llm",request_type="active",version="1"} 3
nv_trt_llm_request_metrics{model="llm",request_type="max",version="1"} 32
nv_trt_llm_request_metrics{model="other",request_type="active",version="1"} 2.000000
"""


def test_active_requests_of_all_models_are_counted() -> None:
    assert count_active(METRICS) == 5


def test_metrics_that_can_not_be_read_say_nothing() -> None:
    assert num_active("127.0.0.1:1") is None


class Server:
    """A server that runs, with its engines in this directory; the first look at it finds no descriptor."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_looks = 0

    def poll(self) -> int | None:
        return None

    def runtime_directories(self) -> list[Path]:
        self._num_looks += 1
        if self._num_looks == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return [self._directory]


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """pytest's own directory may have a path that is too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="naiad-test-") as name:
        yield Path(name)


def test_requests_that_the_metrics_miss_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, socket_dir: Path
) -> None:
    """The old instance of a model that was reloaded keeps the metrics, while the new one has the requests."""
    num_reads, has_read_often = 0, threading.Event()

    def read_nothing(address: str) -> int:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 3 * drain._NUM_IDLE_READS:
            has_read_often.set()
        return 0

    monkeypatch.setattr(drain, "num_active", read_nothing)
    recorder, ended = Recorder(), []
    config = EngineConfig(model_dir=str(socket_dir))
    path, command = socket_dir / "llm.0.engine", fake_command("good")
    engine = EngineClient(config, path, recorder.on_outputs, recorder.on_lost, command=command)
    server = cast("ServerProcess", Server(socket_dir))
    draining = threading.Thread(target=lambda: ended.append(end_requests(server, "", 600)), daemon=True)
    try:
        engine.start()
        engine.submit([make_request(1, HELD_ID)])
        recorder.wait_started(1)
        draining.start()
        assert has_read_often.wait(30)
        assert ended == []
        let_go(socket_dir)
        draining.join(30)
        assert ended == [True]
        recorder.wait_finished(1)
    finally:
        engine.close(timeout_s=0)
