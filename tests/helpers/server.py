"""A real server: `naiad serve` as a user starts it, on free loopback ports."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import psutil

NAIAD = (sys.executable, "-m", "naiad.cli.main")
SETTLED_S = 1.0
Read = TypeVar("Read")
# What runs, waits or holds blocks.
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
REST_S = 60.0
READY = re.compile(r"ready: http=(\S+) grpc=(\S+) metrics=(\S+)(?: openai=(\S+))?")


@dataclass
class Server:
    """A running `naiad serve`."""

    process: subprocess.Popen[str]
    http: str = ""
    grpc: str = ""
    metrics: str = ""
    openai: str = ""
    lines: list[str] = field(default_factory=list)
    asked_to_stop: bool = False

    def stop(self, timeout_s: float = 60) -> int:
        """Send SIGTERM; return the exit code."""
        self.ask_to_stop()
        return self.process.wait(timeout_s)

    def ask_to_stop(self) -> None:
        """Send SIGTERM if the server runs."""
        self.asked_to_stop = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """POST JSON; return status and text."""
        request = urllib.request.Request(f"http://{self.http}{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics_text(self) -> str:
        """Everything on the metrics port."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric on the metrics port."""
        for line in self.metrics_text().splitlines():
            if line.startswith(name + "{") and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels}")

    def settled(self, name: str, **labels: str) -> float:
        """The value of a metric once it has not changed for a while.

        The metrics of a request are written a moment after its last response.
        """
        return settled(lambda: self.metric(name, **labels))

    def used_blocks(self) -> float:
        """KV cache blocks in use."""
        return self.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")

    def num_aborted(self) -> float:
        """Number of cancelled sequences of all models; those that had all of their tokens do not count."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        ends = [line for line in lines if line.startswith("vllm:request_success_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in ends if 'finished_reason="abort"' in line)

    def busy(self) -> dict[str, float]:
        """What runs, waits or is held, over all models; nothing if the server does not serve now."""
        try:
            lines = self.metrics_text().splitlines()
        except (OSError, HTTPException):
            return {}
        found: dict[str, float] = {}
        for line in lines:
            name = line.partition("{")[0]
            if name in BUSY and (value := float(line.rsplit(" ", 1)[1])):
                found[name] = found.get(name, 0.0) + value
        return found

    def rest(self) -> None:
        """Wait until nothing runs, waits or holds blocks; it is an error if that does not happen."""
        comes_to_nothing(self.busy)

    def processes(self, word: str) -> list[psutil.Process]:
        """Live descendants with this word in their command line."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(word in part for part in child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found


# Those that `start_repository` has started in this process.
_started: list[Server] = []


def live_servers() -> list[Server]:
    """The servers that tests have started and not asked to stop, as long as they run."""
    _started[:] = [each for each in _started if not each.asked_to_stop and each.process.poll() is None]
    return list(_started)


class Leaving:
    """Servers whose tests are over.

    Stopping a server takes seconds but hardly any CPU time, so the next test does not wait for it.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._servers: list[Server] = []

    def take(self, server: Server) -> None:
        """See that nothing is left of its requests, and ask it to stop."""
        self._servers.append(server)
        try:
            server.rest()
        finally:
            server.ask_to_stop()

    def check(self) -> None:
        """Wait for all of them; each must have stopped with exit code 0."""
        # A second signal in the last moments of the process would end it by itself.
        failed = [server for server in self._servers if server.process.wait(60) != 0]
        assert not failed, "\n".join(line for server in failed for line in server.lines[-40:])


def start_server(model_dir: Path | str, *options: str, timeout_s: float = 120) -> Server:
    """Start `naiad serve` with this model and wait for its ready line.

    The token budget of a step is not measured, because that takes seconds, unless `options` say so.
    """
    budget = () if "--max-num-batched-tokens" in options else ("--max-num-batched-tokens", "128")
    return start_repository("--model", str(model_dir), *budget, *options, timeout_s=timeout_s)


def start_repository(
    *options: str, timeout_s: float = 120, around: Sequence[str] = (), program: Sequence[str] = NAIAD
) -> Server:
    """Start `naiad serve`, by the command `around` if there is one, and wait for its ready line.

    Args:
        options: options of `naiad serve`.
        timeout_s: how long to wait.
        around: program and first arguments of a command that runs another.
        program: `naiad`, if it is not that of this environment.
    """
    command = [
        *(*around, *program, "serve"),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
        *(() if "--openai-port" in options else ("--openai-port", "off")),
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = Server(process)
    threading.Thread(target=_read, args=(server,), daemon=True).start()
    try:
        eventually(lambda: bool(server.grpc) or process.poll() is not None, timeout_s)
    except AssertionError:
        # The caller gets no server that it could stop.
        server.stop()
        raise
    if not server.grpc:
        raise AssertionError("naiad serve ended:\n" + "\n".join(server.lines))
    _started.append(server)
    return server


@contextlib.contextmanager
def running(leaving: Leaving, repository: Path, *options: str) -> Iterator[Server]:
    """Start a server of this repository; at the end hand it to `leaving`."""
    server = start_repository("--model-repository", str(repository), *options)
    try:
        yield server
    finally:
        leaving.take(server)


@contextlib.contextmanager
def without_engine(server: Server) -> Iterator[None]:
    """Kill the only engine. It starts again at the end, because until then its model's process is stopped."""
    (engine,) = server.processes("naiad.engine_process")
    owner = engine.parent()
    assert owner is not None
    owner.send_signal(signal.SIGSTOP)
    try:
        engine.send_signal(signal.SIGKILL)
        yield
    finally:
        owner.send_signal(signal.SIGCONT)


def run_serve(options: Sequence[str], timeout_s: float = 60) -> tuple[int, str]:
    """Run a `naiad serve` that is expected to exit by itself; return its exit code and output."""
    command = [sys.executable, "-m", "naiad.cli.main", "serve", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, done.stdout + done.stderr


def eventually(condition: Callable[[], bool], timeout_s: float = 30) -> float:
    """Wait until the condition holds; return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"did not happen within {timeout_s} s")
        time.sleep(0.01)
    return time.monotonic() - start


def comes_to_nothing(read: Callable[[], dict[str, Any]]) -> None:
    """Wait until what is read is empty; otherwise the error has what was found last."""
    found: dict[str, Any] = {}

    def is_empty() -> bool:
        nonlocal found
        found = read()
        return not found

    try:
        eventually(is_empty, REST_S)
    except AssertionError:
        raise AssertionError(f"a server without requests still has {found}") from None


def settled(read: Callable[[], Read]) -> Read:
    """Read a value until it has not changed for a while; return it."""
    value, since_s = read(), time.monotonic()
    while time.monotonic() - since_s < SETTLED_S:
        time.sleep(0.05)
        now = read()
        if now != value:
            value, since_s = now, time.monotonic()
    return value


def reached(read: Callable[[], Read], expected: Read, timeout_s: float = 30) -> Read:
    """Read a value until it is as expected or the time is up, then until it has settled; return it."""
    give_up_s = time.monotonic() + timeout_s
    while read() != expected and time.monotonic() < give_up_s:
        time.sleep(0.05)
    return settled(read)


def gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether all have ended; zombies count as ended."""
    return not any(_is_alive(process) for process in processes)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _read(server: Server) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.lines.append(line.rstrip())
        if match := READY.search(line):
            server.http, server.metrics = match.group(1), match.group(3)
            server.openai = match.group(4) or ""
            server.grpc = match.group(2)
