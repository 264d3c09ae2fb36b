"""A server beside the Triton server: started, started again when it ends, and stopped."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from naiad.cli.console import say_if_possible
from naiad.cli.serve.listeners import listens
from naiad.engine_process.instance import engine_names
from naiad.engine_process.runtime_dir import runtime_directories_below
from naiad.errors import StartupError

_START_TIMEOUT_S = 30.0
# It attaches to an engine within a second; longer only on a machine that has more to do than it can.
FIRST_MODEL_TIMEOUT_S = 15.0
_CONNECT_TIMEOUT_S = 1.0
_POLL_S = 0.05
_STOP_TIMEOUT_S = 5.0
_FORK_RETRY_S = 1.0
_BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
_STABLE_S = 60.0
# To read its keys again, and to say that it is not ready.
_TOLD_BY = (signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidePlan:
    """What the server is started with.

    Attributes:
        name: what it is, for messages.
        module: the Python module that it runs.
        host: address that it listens on.
        port: port that it listens on.
        options: the module's options.
        has_keys: whether it reads a file of keys, and reads it again on SIGHUP.
        has_models: whether it serves the engines' models, and says at /health that it has one.
    """

    name: str
    module: str
    host: str
    port: int
    options: tuple[str, ...] = ()
    has_keys: bool = False
    has_models: bool = False


class SideProcess:
    """One such server at a time."""

    def __init__(self, plan: SidePlan) -> None:
        """Set up; `start` starts it."""
        self._plan = plan
        self._num_failures = 0
        self._started_s = 0.0
        self._next_start_s = 0.0
        self._is_refused = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def has_keys(self) -> bool:
        """Whether it reads a file of keys."""
        return self._plan.has_keys

    def start(self) -> None:
        """Start it, without waiting."""
        self._started_s = time.monotonic()
        parent = f"--parent-pid={os.getpid()}"
        command = [sys.executable, "-m", self._plan.module, *self._plan.options, parent]
        # It would end by a signal that comes before its handler: these stay blocked until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD_BY)
        try:
            # Only the supervisor should get the terminal's Ctrl-C.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # The engine names its checkpoint's path in UTF-8.
                env={"PYTHONUTF8": "1", **os.environ},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD_BY)

    def reload(self) -> None:
        """Make it read its keys again; one that is not running reads them when it starts."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def announce_stop(self) -> None:
        """Make it say that it is not ready, if it has models: new requests are refused from now on."""
        if self._plan.has_models and self._process is not None:
            self._process.send_signal(signal.SIGUSR1)

    def wait_until_it_serves(self, stop: Callable[[float], bool]) -> None:
        """Wait until it accepts connections and, if it has models and there are engines, lists the first.

        If no model comes in time a warning says so: Triton's own ports may serve all the same.

        Args:
            stop: waits so many seconds; true: this should be given up.

        Raises:
            StartupError: it ended, or does not listen in time.
        """
        if not self._wait_for(self._listens, _START_TIMEOUT_S, stop):
            raise StartupError(self._failure)
        if not self._plan.has_models:
            return
        # The last engine may go while it is waited for.
        if not self._wait_for(
            lambda: not _has_engines() or self._lists_a_model(), FIRST_MODEL_TIMEOUT_S, stop
        ):
            say_if_possible(
                f"{self._plan.name} has no model {FIRST_MODEL_TIMEOUT_S:g} s after the Triton server is "
                "ready: its requests get status 503 until it reaches an engine",
                "warning",
            )

    def _wait_for(self, holds: Callable[[], bool], timeout_s: float, stop: Callable[[float], bool]) -> bool:
        """Wait until it holds, or until `stop`; return False if the time is up first.

        Raises:
            StartupError: the process ended.
        """
        assert self._process is not None
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            code = self._process.poll()
            if code is not None:
                raise StartupError(f"{self._failure}: exit code {code}")
            if time.monotonic() > deadline_s:
                return False
            if stop(_POLL_S):
                break
        return True

    @property
    def _failure(self) -> str:
        return f"{self._plan.name} did not start on {self._plan.host}:{self._plan.port}"

    def tend(self) -> None:
        """Start it again if it has ended, after a pause that grows with each failure in a row."""
        if self._process is not None and self._process.poll() is not None:
            now_s = time.monotonic()
            is_stable = now_s - self._started_s > _STABLE_S
            pause_s = _BACK_OFF_S[0 if is_stable else min(self._num_failures, len(_BACK_OFF_S) - 1)]
            self._num_failures = 1 if is_stable else self._num_failures + 1
            self._next_start_s = now_s + pause_s
            say_if_possible(
                f"restarting {self._plan.name}: it ended with exit code {self._process.returncode}",
                "warning",
            )
            self._process = None
        if self._process is None and time.monotonic() >= self._next_start_s:
            self._try_to_start()

    def _try_to_start(self) -> None:
        """Start it; if the machine lacks processes or descriptors, say so once and try again later."""
        try:
            self.start()
            self._is_refused = False
        except OSError as error:
            if not self._is_refused:
                say_if_possible(f"{self._plan.name} can not be started now: {error.strerror}", "warning")
            self._is_refused = True
            self._next_start_s = time.monotonic() + _FORK_RETRY_S

    def stop(self) -> None:
        """Stop it; its requests should have ended."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listens(self) -> bool:
        try:
            address = (self._plan.host, self._plan.port)
            with socket.create_connection(address, _CONNECT_TIMEOUT_S):
                pass
        except OSError:
            return False
        return self._process is not None and listens(self._process.pid, self._plan.port)

    def _lists_a_model(self) -> bool:
        connection = http.client.HTTPConnection(self._plan.host, self._plan.port, timeout=_CONNECT_TIMEOUT_S)
        try:
            # Needs no key. It answers to localhost, whatever its address is called.
            connection.request("GET", "/health", headers={"Host": "localhost"})
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _has_engines() -> bool:
    """Whether a Triton server below this process has an engine; one with nothing loaded has none."""
    return any(engine_names(directory) for directory in runtime_directories_below(os.getpid()))
