"""When the supervisor starts its server again, and how long it waits before; no server runs."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from naiad.cli.serve import supervisor
from naiad.cli.serve.server_log import ServerLog
from naiad.cli.serve.server_process import ServerProcess
from naiad.cli.serve.start_watch import StartSight, StartWatch
from naiad.cli.serve.stop_signal import StopSignal
from naiad.cli.serve.supervisor import ServerPlan, Supervisor
from naiad.errors import StartupError

NO_PROCESS = OSError(errno.EAGAIN, "Resource temporarily unavailable")


class Clock:
    """Stands in for `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Stop:
    """A signal that arrives in place of the pause with this number; notes the pauses before it."""

    num_pauses: int
    pauses_s: list[float] = field(default_factory=list)
    is_set: bool = False

    def wait(self, timeout_s: float) -> bool:
        if len(self.pauses_s) == self.num_pauses:
            return True
        self.pauses_s.append(timeout_s)
        return False


class Server:
    """A server that can be killed."""

    def kill(self, timeout_s: float) -> None:
        pass

    def start_sight(self) -> object:
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


def pauses(
    monkeypatch: pytest.MonkeyPatch, num_pauses: int, start: Callable[[], object], watch: Callable[[], object]
) -> list[float]:
    """Run a supervisor whose servers start and are watched so; return the pauses before its starts."""
    monkeypatch.setattr(Supervisor, "_start", lambda _self: start())
    monkeypatch.setattr(Supervisor, "_watch", lambda _self, _server: watch())
    stop = Stop(num_pauses)
    Supervisor(make_plan(), cast("StopSignal", stop), lambda: None).run()
    return stop.pauses_s


def make_plan() -> ServerPlan:
    return ServerPlan(
        command=lambda: [],
        environment={},
        runtime_dir=Path("/nowhere"),
        models=[],
        http_address="127.0.0.1:1",
        grpc_address="127.0.0.1:1",
        metrics_address="127.0.0.1:1",
        start_timeout_s=1,
        exit_timeout_s=1,
        is_verbose=False,
    )


@pytest.mark.parametrize(
    ("load_s", "lives_s", "expected"),
    [
        (90.0, 1.0, [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]),
        (0.0, 90.0, [0.0] * 6),
    ],
)
def test_only_a_server_that_has_served_for_long_is_started_again_at_once(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, load_s: float, lives_s: float, expected: list[float]
) -> None:
    def start() -> Server:
        clock.now_s += load_s
        return Server()

    def watch() -> str:
        clock.now_s += lives_s
        return "it ended by itself"

    assert pauses(monkeypatch, 6, start, watch) == expected


@pytest.mark.usefixtures("clock")
def test_a_restart_that_gets_no_process_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[Server | OSError] = [Server(), NO_PROCESS, NO_PROCESS, Server()]

    def start() -> Server:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    assert pauses(monkeypatch, 4, start, lambda: "it ended") == [0.0, 1.0, 2.0, 4.0]
    said = capsys.readouterr().err
    assert said.count("the server did not start again: [Errno 11] Resource temporarily unavailable") == 2


@pytest.mark.usefixtures("clock")
def test_a_first_start_that_gets_no_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Server:
        raise NO_PROCESS

    with pytest.raises(OSError, match="temporarily unavailable"):
        pauses(monkeypatch, 2, start, lambda: None)


def test_a_start_goes_on_when_there_is_no_descriptor_to_look_at_it_with() -> None:
    server, log = cast("ServerProcess", Server()), ServerLog(print, hold=True)
    supervisor._check_progress(server, StartWatch(1.0, 0.0), log)


def test_a_start_without_progress_is_an_error() -> None:
    class Idle(Server):
        def start_sight(self) -> object:
            return StartSight()

    server, log = cast("ServerProcess", Idle()), ServerLog(print, hold=True)
    with pytest.raises(StartupError, match="made no progress for 1 s"):
        supervisor._check_progress(server, StartWatch(1.0, -1000.0), log)
