"""Three servers of one tiny model, and a proxy in front of them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from deploy.proxy import Plan, Replica, program_of, start_command

from helpers.openai_api import COMPLETIONS, post
from helpers.ports import free_port
from helpers.prometheus import Scrape, read_page
from helpers.server import Server, eventually, gone, start_repository
from naiad.errors import StartupError

NUM_REPLICAS = 3
# Of each cycle in which a slow replica's engine is stopped and goes on.
_STOPPED_S, _RUNNING_S = 0.2, 0.02
# Others serve meanwhile, on the same cores.
_START_S = 300
# Longer than a proxy takes to see what `/health` says: it asks each second.
_SHUTDOWN_DELAY_S = 3


class Replicas:
    """Servers of one repository, each on ports that it keeps when it is started again."""

    def __init__(self, repository: Path, *options: str) -> None:
        """Start them, one after the other."""
        delay = ("--shutdown-delay-s", str(_SHUTDOWN_DELAY_S))
        self._options = ("--model-repository", str(repository), "--cpu-threads", "1", *delay, *options)
        self.places = [
            Replica("127.0.0.1", free_port(), free_port(), free_port()) for _ in range(NUM_REPLICAS)
        ]
        self.servers: list[Server] = []
        try:
            for place in self.places:
                self.servers.append(self._started(place))
        except BaseException:
            self.stop()
            raise

    def _started(self, place: Replica) -> Server:
        ports = (
            *("--openai-port", str(place.openai_port), "--grpc-port", str(place.grpc_port)),
            *("--kv-events-endpoint", str(place.kv_events_port), "--kv-events-token-ids", "true"),
        )
        return start_repository(*self._options, *ports, timeout_s=_START_S)

    def restart(self, index: int) -> None:
        """Stop one as an operator would, and start it again."""
        assert self.servers[index].stop() == 0, "\n".join(self.servers[index].lines[-20:])
        self.start(index)

    def start(self, index: int) -> None:
        """Start one that has ended."""
        self.servers[index] = self._started(self.places[index])

    def kill(self, index: int) -> None:
        """Kill all processes of one at once, like a machine that is lost."""
        root = psutil.Process(self.servers[index].process.pid)
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.servers[index].process.wait(30)
        eventually(lambda: gone(processes))

    @contextlib.contextmanager
    def slow(self, index: int) -> Iterator[None]:
        """Let the engine of one run a tenth of the time only."""
        (engine,) = self.servers[index].processes("naiad.engine_process")
        over = threading.Event()

        def hold_up() -> None:
            while not over.is_set():
                engine.send_signal(signal.SIGSTOP)
                time.sleep(_STOPPED_S)
                engine.send_signal(signal.SIGCONT)
                time.sleep(_RUNNING_S)

        thread = threading.Thread(target=hold_up)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def stop(self) -> None:
        """Stop those that run."""
        for server in self.servers:
            server.ask_to_stop()
        for server in self.servers:
            server.process.wait(60)

    def served(self) -> list[int]:
        """How many completions each has answered."""
        return [
            int(sum(_page(server).values("naiad_openai_requests_total", route=COMPLETIONS)))
            for server in self.servers
        ]

    def running(self) -> list[int]:
        """How many sequences run in each."""
        return [int(_page(server).value("vllm:num_requests_running")) for server in self.servers]


class Proxy:
    """A proxy that runs.

    Attributes:
        plan: what it does.
        process: its process, whose output goes into a file.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Start it on free ports, and wait until it lets requests through."""
        self.plan = replace(plan, port=free_port(), grpc_port=free_port(), admin_port=free_port())
        self.log = folder / f"{plan.proxy}.log"
        with self.log.open("wb") as log:
            command = start_command(self.plan, folder)
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(self._lets_through, 30)
        except AssertionError:
            self.stop()
            raise AssertionError(self.log.read_text()[-4000:]) from None

    @property
    def address(self) -> str:
        """HOST:PORT of the OpenAI API."""
        return f"{self.plan.host}:{self.plan.port}"

    @property
    def grpc(self) -> str:
        """HOST:PORT of gRPC."""
        return f"{self.plan.host}:{self.plan.grpc_port}"

    def _lets_through(self) -> bool:
        assert self.process.poll() is None
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def admin(self, path: str) -> str:
        """What it says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.plan.admin_port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)


def available(name: str) -> str:
    """Return a proxy's name, or skip the test if it can not be had."""
    try:
        program_of(name)
    except StartupError as error:
        pytest.skip(str(error))
    return name


@contextlib.contextmanager
def proxied(plan: Plan, folder: Path) -> Iterator[Proxy]:
    """Run a proxy."""
    proxy = Proxy(plan, folder)
    try:
        yield proxy
    finally:
        proxy.stop()


def _page(server: Server) -> Scrape:
    status, _, raw = post(server, "/metrics", b"", "GET")
    assert status == 200
    return read_page(raw.decode())
