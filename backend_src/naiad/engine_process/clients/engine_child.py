"""One run of the engine process, seen from its parent, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from naiad.config.engine_config import EngineConfig, field_names
from naiad.engine_process.clients.engine_connection import EngineConnection
from naiad.engine_process.protocol import (
    Busy,
    EngineMessage,
    Observed,
    Ready,
    SnapshotTaken,
    StartFailed,
    StepDone,
    StopRequests,
    UsageReport,
)
from naiad.engine_process.unix_socket import check_socket_path
from naiad.errors import StartupError

# What the engine sends to its owner. Only steps and reports wait until it has started.
OwnersMessage = StepDone | StopRequests | Observed | UsageReport | Busy | SnapshotTaken

_CONNECT_RETRY_S = 0.01
_START_POLL_S = 0.2
_EXIT_WAIT_S = 5.0

# Used unless the user has set them.
# PYTHONUTF8: paths are UTF-8, as in config.pbtxt, whatever the locale is.
# PYTHONSAFEPATH: modules must not be imported from the server's working directory.
# GOMP_SPINCOUNT: the server and its stubs need the same cores. A thread that spins while it waits for
# another keeps that one from running on its core; a thread that sleeps at once wakes too late. This count
# is about 0.1 ms, longer than the gaps between a step's parallel regions.
_CHILD_SETTINGS = {"PYTHONUTF8": "1", "PYTHONSAFEPATH": "1", "GOMP_SPINCOUNT": "10000"}


def default_command() -> list[str]:
    """The engine process's command, with the Python that runs this process."""
    # An embedded interpreter may not know its own path.
    python = sys.executable or str(Path(sys.prefix) / "bin" / "python3")
    return [python, "-m", "naiad.engine_process"]


def child_environment() -> dict[str, str]:
    """This process's environment, with the variables that must be set before torch is imported."""
    return {**_CHILD_SETTINGS, **os.environ}


def config_options(config: EngineConfig) -> list[str]:
    """The configuration as the engine process's options."""
    # Option and value are one word because a value may begin with a dash.
    return [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in field_names()]


class EngineChild:
    """The process and the socket to it. One thread receives; any thread may send, one at a time."""

    def __init__(self, command: Sequence[str], config: EngineConfig, socket_path: Path) -> None:
        """Start the process.

        Args:
            command: program and first arguments; socket, parent and configuration are appended.
            config: passed on as options.
            socket_path: where the process will listen, in a private directory; a file that is left
                there is removed.

        Raises:
            StartupError: the program cannot be run, or the socket's path is too long.
        """
        check_socket_path(socket_path)
        self._socket_path = socket_path
        self._connection: EngineConnection | None = None
        self._arrivals = select.poll()
        self._early: list[OwnersMessage] = []
        arguments = [*command, "--socket", str(socket_path), "--parent-pid", str(os.getpid())]
        arguments += config_options(config)
        try:
            socket_path.unlink(missing_ok=True)
            # It stays in the server's process group, so that killing the group kills it too.
            self._process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, env=child_environment())
        except OSError as error:
            raise StartupError(f"the engine process can not be run: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait_until_ready(self, timeout_s: float, is_cancelled: Callable[[], bool]) -> Ready:
        """Connect and wait for the engine.

        Args:
            timeout_s: for connecting and waiting together.
            is_cancelled: called every now and then; True ends the wait.

        Raises:
            StartupError: the engine reported an error, the process ended or could not be connected to,
                or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while self._connection is None:
            self._check_start(deadline, is_cancelled)
            if self._process.poll() is not None:
                raise StartupError(f"the engine process ended while starting ({self._describe_exit()})")
            self._connection = _try_connect(self._socket_path)
        self._arrivals.register(self._connection, select.POLLIN)
        try:
            while (ready := self._ready_among(self._receive(_START_POLL_S))) is None:
                self._check_start(deadline, is_cancelled)
            return ready
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_WAIT_S)
            text = f"the engine process ended while starting ({self._describe_exit()})"
            raise StartupError(text) from None

    def receive(self, timeout_s: float) -> list[OwnersMessage]:
        """Return the next messages; none if the timeout comes first.

        Raises:
            OSError: the process is gone, or violates the protocol.
        """
        messages: Sequence[EngineMessage] = self._early or self._receive(timeout_s)
        self._early = []
        expected = [message for message in messages if isinstance(message, OwnersMessage)]
        if len(expected) != len(messages):
            raise ConnectionError("the engine process announced itself twice")
        return expected

    def send(self, frame: bytes) -> None:
        """Send a frame. If the process does not read, it is killed, and `receive` raises."""
        assert self._connection is not None
        try:
            self._connection.send(frame)
        except OSError:
            self.kill()

    def terminate(self) -> None:
        """Ask the process to exit at once."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process; does not wait."""
        self._process.kill()

    def reap(self) -> str:
        """Kill the process if it runs, wait for it, remove its socket, and describe how it ended."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Only a process stuck in the kernel takes longer; init will reap it.
            self._process.wait(_EXIT_WAIT_S)
        # The next process's start tries once more.
        with contextlib.suppress(OSError):
            self._socket_path.unlink(missing_ok=True)
        return self._describe_exit()

    def disconnect(self) -> None:
        """Close the socket; no thread may be sending."""
        if self._connection is not None:
            self._connection.close()

    def _check_start(self, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        if is_cancelled():
            raise StartupError("the engine was closed while it started")
        if time.monotonic() > deadline:
            raise StartupError("the engine did not become ready in time")

    def _ready_among(self, messages: list[EngineMessage]) -> Ready | None:
        """Return `Ready` if it is there; the others, which come of other clients, are for `receive`."""
        ready = None
        for message in messages:
            match message:
                case StartFailed(text):
                    raise StartupError(text)
                case Ready():
                    ready = message
                case StepDone() if ready is None:
                    raise ConnectionError("the engine process spoke before it was ready")
                case StepDone() | StopRequests() | Observed() | UsageReport() | Busy() | SnapshotTaken():
                    self._early.append(message)
        return ready

    def _receive(self, timeout_s: float) -> list[EngineMessage]:
        assert self._connection is not None
        return self._connection.receive() if self._arrivals.poll(timeout_s * 1000) else []

    def _describe_exit(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it still runs"
        if code < 0:
            # Real-time signals have no name.
            with contextlib.suppress(ValueError):
                return f"signal {-code}, {signal.Signals(-code).name}"
            return f"signal {-code}"
        return f"exit code {code}"


def _try_connect(path: Path) -> EngineConnection | None:
    """Return a connection; None, after a pause, if no process listens yet.

    Raises:
        StartupError: it can not be made, for want of descriptors or memory for example.
    """
    try:
        return EngineConnection(path)
    except (FileNotFoundError, ConnectionRefusedError, TimeoutError, BlockingIOError):
        time.sleep(_CONNECT_RETRY_S)
        return None
    except OSError as error:
        raise StartupError(f"no connection to the engine process can be made: {error.strerror}") from error
