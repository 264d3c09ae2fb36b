"""The ranks of a split model start together and end together."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.engine_harness import WAIT_S, Recorder, has_ended, make_request, wait_until
from helpers.tiny_models import make_tiny_model
from helpers.tiny_repository import tiny_checkpoint
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.engine_process.clients.engine_child import default_command
from naiad.errors import ModelError
from naiad.model_runner import ModelRunner
from naiad.model_runner.channel import Channel
from naiad.model_runner.ranks.followers import call_at_end

NUM_TOKENS = 40
# Engine, its client, what it says, and the file of the lines of its processes.
Served = tuple[EngineConfig, EngineClient, Recorder, Path]
# Four processes import torch side by side.
START_S = 300.0


def rank_pids(pid: int) -> list[int]:
    """The rank processes below a process."""
    children = psutil.Process(pid).children()
    return [each.pid for each in children if "naiad.model_runner.ranks" in each.cmdline()]


def make_config(folder: Path, size: int, stages: int = 1) -> EngineConfig:
    return EngineConfig(
        model_dir=str(folder),
        dtype="float32",
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 24,
        tensor_parallel_size=size,
        pipeline_parallel_size=stages,
    )


def test_a_start_that_fails_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: torch.zeros(36, 50)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor '{name}' has shape \(36, 50\)"):
        ModelRunner(make_config(tmp_path, 2))
    assert rank_pids(os.getpid()) == []


class NotedWaits(subprocess.Popen[bytes]):
    """A process that notes how its end is waited for."""

    def __init__(self, command: list[str]) -> None:
        self.time_limits: list[float | None] = []
        super().__init__(command, stdin=subprocess.PIPE)

    def wait(self, timeout: float | None = None) -> int:
        self.time_limits.append(timeout)
        return super().wait(timeout)

    def poll(self) -> int | None:
        raise AssertionError("the process is asked for again and again")


def test_the_kernel_tells_the_first_rank_that_another_has_ended() -> None:
    """The one wait for a rank has no time limit, so nothing but the rank's end ends it."""
    codes: queue.Queue[int] = queue.Queue()
    with NotedWaits(["cat"]) as rank:
        call_at_end(rank, codes.put)
        wait_until(lambda: bool(rank.time_limits))
        assert codes.empty()
        os.kill(rank.pid, signal.SIGKILL)
        assert codes.get(timeout=WAIT_S) == -signal.SIGKILL
        assert rank.time_limits == [None]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_rank_waits_for_the_end_of_the_first_one(is_closed: bool) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"a step that nobody can compute")
        if is_closed:
            there.close()
        assert Channel(here).ends_within(60.0 if is_closed else 0.05) is is_closed


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """An engine process with more ranks: two stages of two parts each, or three stages."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="naiad-test-") as directory:
        checkpoint = tiny_checkpoint(Path(directory) / "checkpoint")
        config = make_config(checkpoint, *request.param)
        socket_path = Path(directory) / "llm.engine"
        log = Path(directory) / "log"
        command = ["sh", "-c", f'exec "$@" 2>>{log}', "sh", *default_command()]
        client = EngineClient(config, socket_path, recorder.on_outputs, recorder.on_lost, command=command)
        client.start()
        yield config, client, recorder, log
        client.close(timeout_s=0)


@pytest.mark.slow
@pytest.mark.parametrize("served", [(2, 2)], ids=["2 x 2"], indirect=True)
@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_the_death_of_a_rank_ends_all_and_the_engine_restarts(
    served: Served, rank: int, is_busy: bool
) -> None:
    kill_rank(served, rank, is_busy)


@pytest.mark.slow
@pytest.mark.parametrize("served", [(1, 3)], ids=["1 x 3"], indirect=True)
def test_the_death_of_a_stage_between_others_ends_all_too(
    served: Served,
) -> None:
    """One neighbour sends to it and the other waits for it."""
    kill_rank(served, 1, is_busy=True)


def kill_rank(served: Served, rank: int, is_busy: bool) -> None:
    config, client, recorder, log = served
    first_id, num_losses = 100 * (1 + 2 * rank + is_busy), recorder.num_losses
    client.submit([make_request(first_id, 5, NUM_TOKENS)])
    recorder.wait_finished(first_id)
    engine = client.pid
    assert engine is not None
    pids = [engine, *rank_pids(engine)]
    assert len(pids) == config.num_ranks
    if is_busy:
        client.submit([make_request(first_id + 1, 5, 4000)])
        recorder.wait_started(first_id + 1)
    num_before = len(log.read_text())
    os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, pids)))
    recorder.wait_for(lambda: recorder.num_losses > num_losses)
    said = log.read_text()[num_before:]
    assert "Traceback" not in said
    named = f"rank {rank} of the model has ended (signal 9, SIGKILL), so the engine ends"
    # Of the first rank the server says it.
    assert said.count("has ended") == said.count(named) == (rank > 0)
    wait_until(lambda: client.is_ready, START_S)
    client.submit([make_request(first_id + 2, 5, NUM_TOKENS)])
    recorder.wait_finished(first_id + 2)
    assert recorder.token_ids(first_id + 2) == recorder.token_ids(first_id)
