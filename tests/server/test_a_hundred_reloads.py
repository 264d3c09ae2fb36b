"""A hundred reloads of a model under load: no request fails, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

import psutil
import pytest

from helpers.model_control import control_client
from helpers.raw_grpc import Outcome, ask, text_inputs
from helpers.server import Server, eventually, start_repository
from helpers.tiny_repository import create_repository, tiny_checkpoint

NUM_RELOADS = 100
MODELS = ("ensemble", "text")
# What a hundred reloads may leave in the server itself; a lost engine or stub would be far more.
MOST_DESCRIPTORS = 30
# A new process writes the model's metrics when the old one has deleted its own.
NO_BLOCK_IS_USED = re.compile(
    r'^nv_trt_llm_kv_cache_block_metrics\{.*kv_cache_block_type="used".*\} 0$', re.M
)
INPUTS = text_inputs("Story", 40, ignore_eos=True)


class Client(threading.Thread):
    """Asks a model again and again."""

    def __init__(self, server: Server, model: str, expected: str) -> None:
        super().__init__()
        self.num_whole = 0
        self.failed: list[Outcome] = []
        self.stopping = threading.Event()
        self._server, self._model, self._expected = server, model, expected

    def run(self) -> None:
        while not self.stopping.is_set():
            outcome = ask(self._server.grpc, self._model, INPUTS)
            is_whole = not outcome.errors and not outcome.call_error and outcome.num_finals == 1
            if is_whole and outcome.text == self._expected:
                self.num_whole += 1
            else:
                self.failed.append(outcome)


@pytest.mark.slow
def test_a_hundred_reloads_under_load(tmp_path: Path) -> None:
    repository, key_file = tmp_path / "repository", tmp_path / "key"
    create_repository(repository, tiny_checkpoint(tmp_path / "checkpoint"), "--max-num-seqs", "8")
    options = ("--model-control-mode", "explicit", "--model-control-key", str(key_file))
    server = start_repository("--model-repository", str(repository), *options)
    control = control_client(server.grpc, key_file)
    expected = {model: ask(server.grpc, model, INPUTS).text for model in MODELS}
    clients = [Client(server, model, expected[model]) for model in MODELS]
    before = held(server)
    for client in clients:
        client.start()
    try:
        for _ in range(NUM_RELOADS):
            # The server loads a model anew only if its files have changed.
            os.utime(repository / "llm" / "1" / "model.py")
            control.load_model("llm")
    finally:
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join()
        control.close()
    assert [client.failed for client in clients] == [[], []]
    assert all(client.num_whole >= NUM_RELOADS // 2 for client in clients)
    eventually(lambda: held(server)[0] == before[0])
    assert held(server)[1] <= before[1] + MOST_DESCRIPTORS
    eventually(lambda: NO_BLOCK_IS_USED.search(server.metrics_text()) is not None)
    assert server.stop() == 0, "\n".join(server.lines[-40:])


def held(server: Server) -> tuple[int, int]:
    """Number of processes below `naiad serve`, and of the server's own descriptors."""
    names: dict[psutil.Process, str] = {}
    for each in psutil.Process(server.process.pid).children(recursive=True):
        # A model that is unloaded may end its process meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            names[each] = each.name()
    (tritonserver,) = [each for each, name in names.items() if name == "tritonserver"]
    return len(names), tritonserver.num_fds()
