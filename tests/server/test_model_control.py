"""Loading and unloading models through Triton's API during traffic: clean answers, no leaks."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from helpers.model_control import control_client
from helpers.raw_grpc import Outcome, Stream, ask, llm_inputs, text_inputs
from helpers.server import Server, eventually, settled, start_repository
from helpers.tiny_repository import create_repository, tiny_checkpoint
from naiad.cli.serve.shared_memory import mapped_regions
from naiad.engine_process import runtime_path

MODELS = ("ensemble", "tokenizer", "llm", "detokenizer", "text")
# The server's own messages for a model that is not loaded; it sends no FINAL with them.
NOT_LOADED = re.compile(r"unknown model|no available versions|is not ready")
TOKENS = 40


@dataclass
class Controlled:
    """A server whose models are loaded and unloaded, and the repository that it serves."""

    server: Server
    repository: Path
    key_file: Path
    client: triton.InferenceServerClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = control_client(self.server.grpc, self.key_file)

    @property
    def llm_config(self) -> Path:
        return self.repository / "llm" / "config.pbtxt"

    def edit(self, before: str, after: str) -> None:
        text = self.llm_config.read_text()
        assert before in text
        self.llm_config.write_text(text.replace(before, after))

    def versions(self, name: str) -> dict[str, str]:
        index = self.client.get_model_repository_index().models
        return {model.version: model.state for model in index if model.name == name}

    def reload(self) -> None:
        # The server does not reload a model that has not changed.
        os.utime(self.repository / "llm" / "1" / "model.py")
        self.client.load_model("llm")

    def unload(self) -> None:
        """Unload everything; unloading the ensemble unloads the steps that were not loaded by name."""
        for name in ("ensemble", "text", "llm"):
            self.client.unload_model(name, unload_dependents=True)
        eventually(lambda: all(set(self.versions(name).values()) == {"UNAVAILABLE"} for name in MODELS), 60)

    def load(self) -> None:
        for name in ("ensemble", "text"):
            self.client.load_model(name)

    def sentence(self, model: str = "ensemble") -> Outcome:
        return ask(self.server.grpc, model, text_inputs("The quick", TOKENS, ignore_eos=True))

    def stubs(self) -> list[psutil.Process]:
        return self.server.processes("triton_python_backend_stub")

    def engines(self) -> list[psutil.Process]:
        return self.server.processes("naiad.engine_process")

    def sockets(self) -> set[str]:
        """Sockets and locks; the file of a place comes with the first request."""
        return {name for name in self.files() if not name.endswith(".place")}

    def files(self) -> set[str]:
        (tritonserver,) = [p for p in self.server.processes("tritonserver") if p.name() == "tritonserver"]
        path = runtime_path(tritonserver.pid)
        return {each.name for each in path.iterdir()} if path.is_dir() else set()

    def regions(self) -> set[str]:
        """The server's own regions in /dev/shm."""
        processes = psutil.Process(self.server.process.pid).children(recursive=True)
        return mapped_regions([process.pid for process in processes])

    def labels(self) -> set[str]:
        """The label sets of the engines' counters."""
        lines = re.findall(r"^vllm:generation_tokens_total\{(.*)\}", self.server.metrics_text(), re.MULTILINE)
        return {label for line in lines for label in line.split(",")}

    def generated(self, version: str) -> float:
        return self.server.settled("vllm:generation_tokens_total", model="llm", version=version)


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    """Each test leaves the model loaded."""
    folder = tmp_path_factory.mktemp("model_control")
    create_repository(folder / "repository", tiny_checkpoint(folder / "checkpoint"), "--max-num-seqs", "8")
    options = ["--model-repository", str(folder / "repository"), "--model-control-mode", "explicit"]
    options += ["--model-control-key", str(folder / "key")]
    running = Controlled(start_repository(*options), folder / "repository", folder / "key")
    yield running
    running.client.close()
    assert running.server.stop() == 0, "\n".join(running.server.lines[-40:])


def whole(outcome: Outcome) -> bool:
    return not outcome.errors and not outcome.call_error and outcome.num_finals == 1


def parameter(key: str, value: str) -> str:
    """A parameter in the format of config.pbtxt."""
    return f'key: "{key}" value: {{ string_value: "{value}"'


def test_unloading_gives_everything_back_and_loading_serves_again(controlled: Controlled) -> None:
    text = controlled.sentence().text
    for _ in range(2):
        held = controlled.regions()
        assert len(held) == 4
        controlled.unload()
        eventually(lambda: controlled.stubs() == controlled.engines() == [], 30)
        # `naiad serve` gave the place to nobody while the server unloaded, and removes it a moment later.
        eventually(lambda: controlled.files() == set())
        eventually(functools.partial(are_unmapped, held))
        assert "nv_trt_llm_request_metrics{" not in controlled.server.metrics_text()
        assert NOT_LOADED.search(controlled.sentence().errors[0])
        controlled.load()
        assert controlled.sentence().text == text
    # The supervisor has not mistaken the unloading of models for a failure.
    assert not any("restarting" in line for line in controlled.server.lines)


def test_a_stream_that_runs_ends_whole_when_its_model_is_unloaded(controlled: Controlled) -> None:
    inputs = text_inputs("Story", 2000, ignore_eos=True)
    stream = Stream(controlled.server.grpc, "ensemble", inputs)
    assert stream.got_response.wait(60)
    controlled.unload()
    outcome = stream.join(60)
    assert whole(outcome)
    controlled.load()
    assert outcome.text == ask(controlled.server.grpc, "ensemble", inputs).text


def test_a_reload_takes_new_settings_and_lets_streams_of_the_old_end(controlled: Controlled) -> None:
    server = controlled.server
    text = controlled.sentence().text
    inputs = text_inputs("Story", 2000, ignore_eos=True)
    streams = [Stream(server.grpc, model, inputs) for model in ("ensemble", "text")]
    assert all(stream.got_response.wait(60) for stream in streams)
    controlled.edit(parameter("max_num_seqs", "8"), parameter("max_num_seqs", "5"))
    controlled.client.load_model("llm")
    assert controlled.sentence().text == text
    assert all(whole(stream.join(60)) for stream in streams)
    eventually(lambda: len(controlled.engines()) == 1, 30)
    assert controlled.sentence().text == text
    # The text model has found the new engine.
    assert controlled.sentence("text").text == text
    most = re.compile(r'^nv_trt_llm_request_metrics\{.*request_type="max".*\} 5$', re.MULTILINE)
    eventually(lambda: most.search(controlled.server.metrics_text()) is not None, 10)
    of_the_text_model = len({"number", "metrics"})
    num_sockets = len({"acks", "engine", "number", "metrics"}) + of_the_text_model
    eventually(lambda: len(controlled.sockets()) == num_sockets)


def test_a_failed_reload_leaves_the_old_one_serving(controlled: Controlled) -> None:
    text = controlled.sentence().text
    engines, sockets = controlled.engines(), controlled.sockets()
    # The first value is refused by the stub, the second by the engine process.
    for key, good, bad in (("block_size", "64", "5"), ("kv_cache_bytes", "20000000", "1")):
        stream = Stream(controlled.server.grpc, "ensemble", text_inputs("Story", 2000, ignore_eos=True))
        assert stream.got_response.wait(60)
        controlled.edit(parameter(key, good), parameter(key, bad))
        with pytest.raises(InferenceServerException, match=f"{key} = {bad}"):
            controlled.client.load_model("llm")
        controlled.edit(parameter(key, bad), parameter(key, good))
        assert whole(stream.join(60))
        assert controlled.sentence().text == text
        eventually(lambda: (controlled.engines(), controlled.sockets()) == (engines, sockets))


def test_a_new_version_serves_beside_the_old(controlled: Controlled) -> None:
    server = controlled.server
    shutil.copytree(controlled.repository / "llm" / "1", controlled.repository / "llm" / "2")
    controlled.edit('name: "llm"\n', 'name: "llm"\nversion_policy { all { } }\n')
    controlled.client.load_model("llm")
    assert controlled.versions("llm") == {"1": "READY", "2": "READY"}
    eventually(lambda: len(controlled.engines()) == 2, 30)
    # The old instance of version 1 deletes its metrics; the new one writes its own after that.
    eventually(lambda: settled(lambda: {'version="1"', 'version="2"'} <= controlled.labels()), 10)
    before = [controlled.generated(version) for version in ("1", "2")]
    inputs = llm_inputs([5, 6, 7], 9, ignore_eos=True)
    one, two = (ask(server.grpc, "llm", inputs, model_version=version) for version in ("1", "2"))
    assert whole(one)
    assert one.token_ids == two.token_ids
    # The ensemble uses the newest version.
    assert whole(controlled.sentence())
    eventually(lambda: controlled.generated("2") - before[1] == 9 + TOKENS, 10)
    eventually(lambda: controlled.generated("1") - before[0] == 9, 10)


def are_unmapped(regions: set[str]) -> bool:
    return regions.isdisjoint(os.listdir("/dev/shm"))


class Traffic:
    """Clients that send one request after the other."""

    def __init__(self, address: str, num_clients: int) -> None:
        self._stopping = threading.Event()
        self._address = address
        self.outcomes: list[Outcome] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Outcome]:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self.outcomes

    def _ask(self) -> None:
        while not self._stopping.is_set():
            outcome = ask(self._address, "ensemble", text_inputs("The quick", TOKENS, ignore_eos=True))
            self.outcomes.append(outcome)
            # Avoids a busy loop while nothing is loaded, which would leave no time for loading.
            time.sleep(0.1)


@pytest.mark.parametrize("num_rounds", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_loading_and_unloading_under_traffic(controlled: Controlled, num_rounds: int) -> None:
    text = controlled.sentence().text
    (tritonserver,) = [p for p in controlled.server.processes("tritonserver") if p.name() == "tritonserver"]
    traffic = Traffic(controlled.server.grpc, 2)
    sizes = []
    try:
        for _ in range(num_rounds):
            controlled.reload()
            held = controlled.regions()
            controlled.unload()
            # The old instance of a reload is no longer listed, and may end a little later.
            eventually(lambda: controlled.stubs() == controlled.engines() == [], 30)
            eventually(functools.partial(are_unmapped, held))
            sizes.append(tritonserver.memory_info().rss)
            controlled.load()
    finally:
        outcomes = traffic.stop()
    served = [outcome for outcome in outcomes if not outcome.errors]
    assert len(served) >= num_rounds
    assert all(whole(outcome) and outcome.text == text for outcome in served)
    refused = {outcome.errors[0] for outcome in outcomes if outcome.errors}
    assert all(NOT_LOADED.search(error) for error in refused), refused
    num_refused = len(outcomes) - len(served)
    print(f"{len(served)} served, {num_refused} refused, MiB {[size >> 20 for size in sizes]}")
    # The server's own allocator settles in the first rounds.
    assert sizes[-1] - sizes[min(9, num_rounds - 1)] < 16 << 20


def test_without_the_key_nothing_is_loaded_unloaded_or_listed(controlled: Controlled) -> None:
    with triton.InferenceServerClient(controlled.server.grpc) as client:
        for call in (
            client.get_model_repository_index,
            functools.partial(client.load_model, "llm"),
            functools.partial(client.unload_model, "llm"),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
    for path in ("index", "models/llm/load", "models/llm/unload"):
        status, text = controlled.server.post(f"/v2/repository/{path}", {})
        assert status != 200
        assert "restricted" in text
    assert whole(controlled.sentence())


def test_the_new_process_of_a_model_has_none_of_the_servers_sockets(controlled: Controlled) -> None:
    """A client sees the end of its connection although that was open when the process began."""
    held = len(controlled.engines()), len(controlled.sockets())
    host, _, port = controlled.server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        controlled.reload()
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 200")
    eventually(lambda: (len(controlled.engines()), len(controlled.sockets())) == held)
    # Files, pipes, and what it has opened itself: the engine's listener and its connections.
    assert all(len(stub.net_connections("inet")) == 0 for stub in controlled.stubs())
