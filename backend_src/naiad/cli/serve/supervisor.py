"""Keeps a server running: starts it, probes it as a client would, restarts it and stops it."""

from __future__ import annotations

import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from naiad.cli.console import say_if_possible, write_if_possible
from naiad.cli.control_key import grpc_metadata
from naiad.cli.repository.model_entries import ModelEntry
from naiad.cli.serve.drain import end_requests, num_active
from naiad.cli.serve.log_limit import LogLimit
from naiad.cli.serve.probes import ProbeFailure, Prober, connection_failure
from naiad.cli.serve.server_log import ServerLog, find_cause, other_lines
from naiad.cli.serve.server_process import ServerProcess
from naiad.cli.serve.side_process import SidePlan, SideProcess
from naiad.cli.serve.start_watch import StartWatch
from naiad.cli.serve.stop_signal import StopSignal
from naiad.cli.serve.unloading import Unloading, VersionState
from naiad.cli.serve.watcher import Watcher
from naiad.errors import StartupError
from naiad.log_lines import LogFormat, json_line_of

PROBE_TIMEOUT_S = 3.0
# Time to close connections and unload models; the requests have ended before.
SERVER_EXIT_TIMEOUT_S = 4
_POLL_S = 0.2
_LOOK_S = 1.0
_HTTP_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 10.0
_STOP_MARGIN_S = 2.0
_BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
_STABLE_S = 60.0
# Probes that a starting server may answer with the error of a dead model, one every `_POLL_S`.
_ERRORS_UNTIL_DEAD = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Everything a (re)start needs.

    Attributes:
        command: returns tritonserver with its arguments, which depend on the repository at that time.
        environment: the server's environment variables.
        runtime_dir: a private directory, which the guard removes if the supervisor is killed.
        models: the models to watch; None: those that the server reports as ready.
        http_address: HOST:PORT to ask for readiness.
        grpc_address: HOST:PORT to probe.
        metrics_address: HOST:PORT of the metrics.
        start_timeout_s: time that a start may be without progress.
        exit_timeout_s: time that running requests get to finish.
        shutdown_delay_s: time after a signal in which requests are still taken, while `/health` is 503.
        is_verbose: whether the server's output is shown while it starts.
        log_format: how the server's lines are written.
        control_key: the key of model control; None: clients can not load models.
        beside: the servers beside it: the OpenAI server and the gate.
    """

    command: Callable[[], Sequence[str]]
    environment: dict[str, str]
    runtime_dir: Path
    models: Sequence[ModelEntry] | None
    http_address: str
    grpc_address: str
    metrics_address: str
    start_timeout_s: int
    exit_timeout_s: int
    shutdown_delay_s: int = 0
    is_verbose: bool
    log_format: LogFormat = "text"
    control_key: str | None = None
    beside: Sequence[SidePlan] = ()


class Supervisor:
    """Runs one server at a time until a signal arrives."""

    def __init__(self, plan: ServerPlan, stop: StopSignal, on_ready: Callable[[], None]) -> None:
        """Set up; `on_ready` is called once, when the first server serves."""
        self._plan = plan
        self._stop = stop
        self._on_ready = on_ready
        self._beside = [SideProcess(each) for each in plan.beside]
        for process in self._beside:
            if process.has_keys:
                stop.on_reload = process.reload

    def run(self) -> int:
        """Serve until a signal arrives; return the exit code.

        Raises:
            StartupError: the first server, or several in a row, did not become ready.
            OSError: as much, for lack of processes, descriptors or memory.
        """
        try:
            for process in self._beside:
                process.start()
            return self._run()
        finally:
            self._stop_beside()

    def _run(self) -> int:
        num_failures = 0
        is_first = True
        while not self._stop.wait(_BACK_OFF_S[min(num_failures, len(_BACK_OFF_S) - 1)]):
            try:
                server = self._start()
            except (StartupError, OSError) as error:
                num_failures += 1
                if is_first or num_failures >= len(_BACK_OFF_S):
                    raise
                say_if_possible(f"the server did not start again: {error}", "error")
                continue
            # Loading may take minutes, after which the server has not proved anything yet.
            ready_s = time.monotonic()
            if self._stop.is_set:
                return self._stop_starting(server)
            if is_first:
                for process in self._beside:
                    process.wait_until_it_serves(self._stop.wait)
                self._on_ready()
            else:
                say_if_possible("the server serves again")
            is_first = False
            reason = self._watch(server)
            if reason is None:
                return self._drain(server)
            say_if_possible(f"restarting the server: {reason}", "warning")
            server.kill(_KILL_TIMEOUT_S)
            num_failures = num_failures + 1 if time.monotonic() - ready_s < _STABLE_S else 0
        return 0

    def _start(self) -> ServerProcess:
        """Start a server and wait until it serves or a signal arrives.

        Raises:
            StartupError: it did not become ready.
            OSError: this process lacks processes, descriptors or memory.
        """
        log = ServerLog(self._write(), hold=not self._plan.is_verbose)
        command = self._plan.command()
        server = ServerProcess(command, self._plan.environment, self._plan.runtime_dir, log)
        prober = self._prober()
        watch = StartWatch(self._plan.start_timeout_s, time.monotonic())
        next_look_s = 0.0
        try:
            num_errors = 0
            while (failure := self._first_failure(server, prober)) is not None:
                # A model whose process died after it was loaded never becomes healthy again.
                num_errors = 0 if failure.is_silence else num_errors + 1
                if num_errors >= _ERRORS_UNTIL_DEAD:
                    raise StartupError(f"the server did not start: {failure.reason}")
                code = server.poll()
                if code is not None:
                    raise _start_failure(log.held(), _ending(code, command[0], log.held()))
                if time.monotonic() >= next_look_s:
                    next_look_s = time.monotonic() + _LOOK_S
                    _check_progress(server, watch, log)
                if self._stop.wait(_POLL_S):
                    break
        except BaseException:
            server.kill(_KILL_TIMEOUT_S)
            raise
        finally:
            prober.close()
        log.release()
        return server

    def _watch(self, server: ServerProcess) -> str | None:
        """Watch the server; return why it must be restarted, or None when a signal arrives."""
        prober = self._prober(Unloading(server.runtime_directories).take)
        # If clients may unload models, a missing stub does not prove a failure.
        count_stubs = server.num_stubs if self._plan.models is not None else lambda: 0
        watcher = Watcher(
            lambda: connection_failure(self._plan.http_address, _HTTP_TIMEOUT_S) or prober.probe(),
            count_stubs,
        )
        try:
            while not self._stop.wait(_POLL_S):
                code = server.poll()
                if code is not None:
                    return f"it ended by itself with exit code {code}"
                if watcher.reason is not None:
                    return watcher.reason
                for process in self._beside:
                    process.tend()
            return None
        finally:
            watcher.stop()
            # An open connection would delay the server's exit.
            prober.close()
            watcher.join(timeout_s=1.0)

    def _drain(self, server: ServerProcess) -> int:
        """End all requests, then the server; return the exit code: 1 if it was killed with open requests.

        The requests end first: a stopping server refuses the detokenizer's step, so the
        ensemble's requests would hang until its exit timeout (seen on 2.51).
        """
        for process in self._beside:
            process.announce_stop()
        self._let_balancers_notice(server)
        return self._exit(
            server, have_ended=end_requests(server, self._plan.metrics_address, self._plan.exit_timeout_s)
        )

    def _let_balancers_notice(self, server: ServerProcess) -> None:
        """Go on serving until whoever asks for health has had the time to send new requests elsewhere."""
        delay_s = self._plan.shutdown_delay_s
        if delay_s:
            say_if_possible(f"stopping in {delay_s} s: until then requests are taken")
        end_s = time.monotonic() + delay_s
        while server.poll() is None and time.monotonic() < end_s:
            time.sleep(_POLL_S)

    def _stop_starting(self, server: ServerProcess) -> int:
        """Stop a server that may not serve yet; return the exit code.

        It has metrics as soon as it takes requests, and its models are loaded before.
        """
        if num_active(self._plan.metrics_address) is not None:
            return self._drain(server)
        return self._exit(server, have_ended=True)

    def _exit(self, server: ServerProcess, *, have_ended: bool) -> int:
        """Make a server without running requests exit; return the exit code."""
        self._stop_beside()
        server.terminate()
        deadline_s = time.monotonic() + SERVER_EXIT_TIMEOUT_S + _STOP_MARGIN_S
        while server.poll() is None:
            if time.monotonic() > deadline_s:
                say_if_possible("the server does not stop: killing it", "warning")
                server.kill(_KILL_TIMEOUT_S)
                return 0 if have_ended else 1
            time.sleep(0.05)
        return 0

    def _stop_beside(self) -> None:
        for process in self._beside:
            process.stop()

    def _first_failure(self, server: ServerProcess, prober: Prober) -> ProbeFailure | None:
        """Return why the server does not serve yet; None if it does."""
        address = self._plan.http_address
        try:
            with urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=_HTTP_TIMEOUT_S):
                pass
        except (urllib.error.URLError, OSError):
            return ProbeFailure("the server is not ready", is_silence=True)
        if not server.listens_on(int(address.rpartition(":")[2])):
            return ProbeFailure(f"another program answers at {address}", is_silence=True)
        return prober.probe()

    def _write(self) -> Callable[[str], None]:
        """Return what takes the lines of the server; whoever asks for more of them gets every one."""
        show = _show_json if self._plan.log_format == "json" else _show
        return show if self._plan.is_verbose else LogLimit(show, say_if_possible).take

    def _prober(self, take_states: Callable[[Iterable[VersionState]], None] = lambda _: None) -> Prober:
        metadata = grpc_metadata(self._plan.control_key)
        return Prober(self._plan.grpc_address, self._plan.models, PROBE_TIMEOUT_S, metadata, take_states)


def _check_progress(server: ServerProcess, watch: StartWatch, log: ServerLog) -> None:
    """Look at a starting server; raise a StartupError if it has failed although it still runs."""
    try:
        sight = server.start_sight()
    except OSError:
        # This process has no descriptor for it now; the next look comes soon.
        return
    reason = watch.take(sight, time.monotonic())
    if reason is not None:
        raise _start_failure(log.held(), reason)


def _start_failure(lines: Sequence[str], otherwise: str) -> StartupError:
    """Make an error of the cause in one line, followed by the rest of the server's output.

    Args:
        lines: the server's output.
        otherwise: the cause if the output does not say it.
    """
    cause = find_cause(lines) or otherwise
    details = "".join(f"\n  {line}" for line in other_lines(lines, cause))
    return StartupError(f"the server did not start: {cause}{details}")


def _ending(code: int, program: str, lines: Sequence[str]) -> str:
    if code - 128 in set(signal.Signals):
        killer = signal.Signals(code - 128)
        hint = ", perhaps because the machine has no memory left" if killer is signal.SIGKILL else ""
        return f"{program} was ended by {killer.name}{hint}"
    return (
        f"{program} ended with exit code {code}{'' if lines else ' and printed nothing'}: check that it is a "
        f"tritonserver that runs here (`{program} --help` lists --model-repository)"
    )


def _show(line: str) -> None:
    write_if_possible(f"{line}\n", sys.stderr)


def _show_json(line: str) -> None:
    _show(json_line_of(line, now_s=time.time()))
