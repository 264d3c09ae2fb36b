"""A real engine with native kernels loses a thread, is stopped, or has no core to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import native_engine_child
from helpers.engine_harness import Recorder, make_request, wait_until
from helpers.native_engine_child import LOST_ID
from helpers.tiny_repository import tiny_checkpoint
from naiad.config import EngineConfig
from naiad.engine_process import ClientTimings, EngineClient
from naiad_kernels.native.build import BuildError, compiler
from naiad_kernels.native.variants import best_variant

NUM_TOKENS = 60
MakeNative = Callable[[float], tuple[EngineClient, Recorder]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler()
    except BuildError:
        pytest.skip("no C++ compiler is installed")
    if best_variant() is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a team of two needs two cores with AVX2")
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture
def make_native(checkpoint: Path, socket_dir: Path) -> Iterator[MakeNative]:
    clients: list[EngineClient] = []

    def make(watchdog_s: float) -> tuple[EngineClient, Recorder]:
        recorder = Recorder()
        config = EngineConfig(
            model_dir=str(checkpoint),
            dtype="float32",
            cpu_kernels="native",
            cpu_threads=2,
            max_num_batched_tokens=64,
            kv_cache_bytes=1 << 24,
        )
        client = EngineClient(
            config,
            socket_dir / "llm.engine",
            recorder.on_outputs,
            recorder.on_lost,
            command=[sys.executable, native_engine_child.__file__],
            timings=ClientTimings(watchdog_s=watchdog_s),
        )
        clients.append(client)
        client.start()
        return client, recorder

    yield make
    for client in clients:
        client.close(timeout_s=0)


def tokens_of(client: EngineClient, recorder: Recorder, sequence_id: int) -> list[int]:
    client.submit([make_request(sequence_id, 5, NUM_TOKENS)])
    recorder.wait_finished(sequence_id)
    return recorder.token_ids(sequence_id)


def test_a_thread_that_never_computes_its_share_is_seen_by_the_watchdog(make_native: MakeNative) -> None:
    client, recorder = make_native(2.0)
    expected = tokens_of(client, recorder, 1)
    assert expected
    old_pid = client.pid
    client.submit([make_request(2, LOST_ID)])
    recorder.wait_for(lambda: recorder.num_losses == 1)
    assert 2 not in recorder.outputs
    wait_until(lambda: client.is_ready)
    assert client.pid != old_pid
    assert tokens_of(client, recorder, 3) == expected


def test_a_stopped_process_is_replaced(make_native: MakeNative) -> None:
    client, recorder = make_native(2.0)
    expected = tokens_of(client, recorder, 1)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    client.submit([make_request(2, 5, NUM_TOKENS)])
    recorder.wait_for(lambda: recorder.num_losses == 1)
    wait_until(lambda: client.is_ready)
    assert tokens_of(client, recorder, 3) == expected


def test_a_process_that_is_stopped_for_a_moment_goes_on(make_native: MakeNative) -> None:
    client, recorder = make_native(0)
    expected = tokens_of(client, recorder, 1)
    assert client.pid is not None
    client.submit([make_request(2, 5, NUM_TOKENS)])
    for _ in range(10):
        os.kill(client.pid, signal.SIGSTOP)
        os.kill(client.pid, signal.SIGCONT)
    recorder.wait_finished(2)
    assert (recorder.token_ids(2), recorder.num_losses) == (expected, 0)


def test_starved_cores_change_no_token_and_are_not_taken_for_a_hang(make_native: MakeNative) -> None:
    """Steps of milliseconds take a hundred times as long at most: far less than this watchdog allows."""
    client, recorder = make_native(10.0)
    expected = tokens_of(client, recorder, 1)
    spin = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert [tokens_of(client, recorder, number) for number in (2, 3)] == [expected] * 2
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert recorder.num_losses == 0
