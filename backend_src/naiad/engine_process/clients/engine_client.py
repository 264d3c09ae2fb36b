"""`EngineClient`: owns the engine process, exchanges messages with it, and restarts it when it is lost."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from naiad.config import EngineConfig
from naiad.engine_process.clients.callbacks import call_back, failures_of
from naiad.engine_process.clients.engine_child import EngineChild, OwnersMessage, default_command
from naiad.engine_process.observations import ObservationBatch
from naiad.engine_process.protocol import (
    Abort,
    AskSnapshot,
    Busy,
    Drain,
    Observed,
    Ready,
    SnapshotTaken,
    StepDone,
    StopRequests,
    UsageReport,
    encode_frame,
    encode_requests,
)
from naiad.errors import EngineAwayError, StartupError, UnavailableError, place_of
from naiad.outputs import EngineStats, RequestOutput
from naiad.sequence import EngineRequest
from naiad.usage import TenantUsage

_RECEIVE_POLL_S = 0.5
_TERMINATE_WAIT_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTimings:
    """How long the client waits.

    Attributes:
        start_timeout_s: from the start of the process until it is ready.
        first_backoff_s: before the first restart; doubles with each further one.
        max_backoff_s: maximum wait between restarts.
        healthy_after_s: a run that has been ready this long resets the back-off.
        watchdog_s: an engine that has work, of whichever client, and ends no step for this long is killed;
            so is one that does not answer its owner for this long. 0: never.
    """

    start_timeout_s: float = 900.0
    first_backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    healthy_after_s: float = 60.0
    watchdog_s: float = 120.0


class EngineClient:
    """The engine, for the process that owns it. All methods may be called from any thread.

    Every accepted sequence ends with one output that has a finish reason, or with a call of `on_lost`.
    A sequence that is submitted while the engine is being lost may be reported both by `on_lost` and
    by the error that `submit` raises: the one that removes it from the caller's table answers it.
    If `on_outputs` raises, the sequences of those outputs are aborted and end with one more output, an
    error; whatever else comes of them is to be ignored.

    Attributes:
        on_stop: called by the dispatcher thread with the id of requests that another frontend's client
            wants to cancel. Set it before `start`.
        on_observed: called by the dispatcher thread with what another client has observed of its requests.
            Set it before `start`.
        on_usage: called by the dispatcher thread with what each tenant has used since the engine's start.
            Set it before `start`.
    """

    def __init__(
        self,
        config: EngineConfig,
        socket_path: Path,
        on_outputs: Callable[[list[RequestOutput], EngineStats | None], None],
        on_lost: Callable[[], None],
        *,
        command: Sequence[str] | None = None,
        timings: ClientTimings | None = None,
    ) -> None:
        """Set up; `start` starts the process.

        Args:
            config: the engine's configuration.
            socket_path: where the process listens, in a directory of mode 0700.
            on_outputs: called by the dispatcher thread with the outputs and stats of each message;
                after a loss with empty stats, and after a restart with the new engine's first ones.
            on_lost: called by the dispatcher thread once per loss, when no more outputs will come
                for any sequence submitted so far; the restart follows.
            command: replaces `python -m naiad.engine_process`.
            timings: replaces the defaults.
        """
        self.on_stop: Callable[[str], None] = lambda _: None
        self.on_observed: Callable[[ObservationBatch], None] = lambda _: None
        self.on_usage: Callable[[list[TenantUsage]], None] = lambda _: None
        self._config = config
        self._socket_path = socket_path
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._command = list(command or default_command())
        self._timings = timings or ClientTimings()
        self._backoff_s = self._timings.first_backoff_s
        # Held while sending, so that messages are sent in the order of the calls.
        self._send_lock = threading.Lock()
        # Guards the five fields below; never held during a blocking call.
        self._lock = threading.Lock()
        self._child: EngineChild | None = None
        self._is_ready = False
        self._outstanding: set[int] = set()
        self._is_busy = False  # with sequences of any client, as the engine says
        self._busy_since_s = 0.0
        self._info: Ready | None = None
        # When the dispatcher heard of the engine's loop, and when it asked for a snapshot that has not come
        # yet (infinite: it has not asked).
        self._last_heard_s, self._asked_s = 0.0, math.inf
        self._closing = threading.Event()
        self._dispatcher = threading.Thread(target=self._dispatch, name="engine-dispatcher", daemon=True)

    @property
    def is_ready(self) -> bool:
        """Whether `submit` accepts requests now."""
        return self._is_ready and not self._closing.is_set()

    @property
    def info(self) -> Ready:
        """The engine's description of itself at its last start; only after `start`."""
        assert self._info is not None, "info before start"
        return self._info

    @property
    def pid(self) -> int | None:
        """The process's id; None while no process runs."""
        child = self._child
        return child.pid if child is not None else None

    def start(self) -> None:
        """Start the process and wait until it serves. To be called once.

        Raises:
            StartupError: the engine reported an error, or the process ended.
        """
        self._launch()
        self._dispatcher.start()

    def submit(self, requests: list[EngineRequest]) -> None:
        """Send requests to the engine; each one that it refuses is answered by an error output.

        Raises:
            UnavailableError: there is no engine now, or the server is shutting down; no request was
                accepted.
            InternalError: a value cannot be sent; no request was accepted.
        """
        # Encoded before the sequences are recorded: if encoding fails, nothing will answer them.
        frame = encode_requests(requests)
        with self._send_lock:
            with self._lock:
                if self._closing.is_set():
                    raise UnavailableError("the server is shutting down")
                if not self._is_ready or self._child is None:
                    raise EngineAwayError("the engine is restarting; try again in a few seconds")
                child = self._child
                self._note_work()
                self._outstanding.update(each for request in requests for each in request.sequence_ids)
            child.send(frame)

    def abort(self, sequence_ids: list[int]) -> None:
        """Abort sequences; each that still runs is answered with `cancelled`. Others are ignored."""
        with self._send_lock:
            with self._lock:
                live = [sequence_id for sequence_id in sequence_ids if sequence_id in self._outstanding]
                child = self._child if self._is_ready else None
            if live and child is not None:
                child.send(encode_frame(Abort(live)))

    def stop_others(self, request_id: str) -> None:
        """Have the engine's other clients cancel their requests of this id."""
        with self._send_lock:
            with self._lock:
                child = self._child if self._is_ready else None
            if child is not None:
                child.send(encode_frame(StopRequests(request_id)))

    def close(self, timeout_s: float) -> None:
        """End the process, after giving running sequences `timeout_s` to finish. Idempotent.

        Sequences that are still unanswered are reported by one call of `on_lost`.
        """
        with self._send_lock:
            with self._lock:
                was_closing = self._closing.is_set()
                self._closing.set()
                child = self._child if self._is_ready else None
            if child is not None and not was_closing:
                child.send(encode_frame(Drain()))
        if not self._dispatcher.is_alive():
            return
        self._dispatcher.join(timeout_s)
        for end in (EngineChild.terminate, EngineChild.kill):
            child = self._child
            if child is not None and self._dispatcher.is_alive():
                end(child)
                self._dispatcher.join(_TERMINATE_WAIT_S)

    def _launch(self) -> None:
        child = EngineChild(self._command, self._config, self._socket_path)
        with self._lock:
            self._child = child
        try:
            info = child.wait_until_ready(self._timings.start_timeout_s, self._closing.is_set)
        except BaseException:
            child.reap()
            child.disconnect()
            with self._lock:
                self._child = None
            raise
        with self._lock:
            self._info = info
            self._is_ready = True

    def _dispatch(self) -> None:
        try:
            while not self._closing.is_set():
                self._serve_child()
                self._restart()
        finally:
            # No thread reads the engine's messages any more.
            self._closing.set()
            if self._child is not None:
                self._lose(self._child)

    def _serve_child(self) -> None:
        child = self._child
        assert child is not None
        ready_s = last_step_s = self._last_heard_s = time.monotonic()
        self._asked_s = math.inf
        is_wedged = False
        try:
            while True:
                # Everything that has arrived is read before the engine is killed.
                messages = child.receive(0.0 if is_wedged else _RECEIVE_POLL_S)
                for message in messages:
                    if _is_of_its_loop(message):
                        self._last_heard_s, self._asked_s = time.monotonic(), math.inf
                        if not isinstance(message, SnapshotTaken):
                            last_step_s = self._last_heard_s
                    self._deliver(message)
                if is_wedged and not messages:
                    break
                self._ask_if_quiet(child)
                is_wedged = self._is_wedged(last_step_s)
            logger.error("the engine process stands still for %g s", self._timings.watchdog_s)
        except (OSError, MemoryError) as error:
            if not self._closing.is_set():
                logger.error("the engine process is lost: %s", error)
        if time.monotonic() - ready_s > self._timings.healthy_after_s:
            self._backoff_s = self._timings.first_backoff_s
        self._lose(child)

    def _deliver(self, message: OwnersMessage) -> None:
        match message:
            case StopRequests(request_id):
                call_back(self.on_stop, request_id)
            case Observed(batch):
                call_back(self.on_observed, batch)
            case UsageReport(usages):
                call_back(self.on_usage, usages)
            case Busy(is_busy):
                with self._lock:
                    if is_busy:
                        self._note_work()
                    self._is_busy = is_busy
            case StepDone(outputs, stats):
                self._take(outputs, stats)
            case SnapshotTaken():
                # It was asked for to see that the engine lives.
                return

    def _take(self, outputs: list[RequestOutput], stats: EngineStats | None) -> None:
        finished = [output.sequence_id for output in outputs if output.finish_reason is not None]
        with self._lock:
            self._outstanding.difference_update(finished)
        if not call_back(self._on_outputs, outputs, stats):
            self.abort([output.sequence_id for output in outputs])
            call_back(self._on_outputs, failures_of(outputs), None)

    def _note_work(self) -> None:
        """Note that there is work, whose first step may take as long as any; with `_lock` held."""
        if not self._outstanding and not self._is_busy:
            self._busy_since_s = time.monotonic()

    def _ask_if_quiet(self, child: EngineChild) -> None:
        """Ask the engine for something if it has said nothing for a while.

        A process that is stopped as a whole, while it has no work, can not say that other clients' work has
        come.
        """
        now_s = time.monotonic()
        may_be_quiet_s = self._timings.watchdog_s / 2
        if may_be_quiet_s and self._asked_s == math.inf and now_s - self._last_heard_s > may_be_quiet_s:
            self._asked_s = now_s
            with self._send_lock:
                child.send(encode_frame(AskSnapshot()))

    def _is_wedged(self, last_step_s: float) -> bool:
        """Whether a question stays without an answer, or work without a step, for too long.

        An answer is no step: a loop that lives may have lost a sequence.
        """
        limit_s, now_s = self._timings.watchdog_s, time.monotonic()
        if not limit_s:
            return False
        with self._lock:
            has_work = self._is_busy or bool(self._outstanding)
            works_since_s = max(last_step_s, self._busy_since_s)
        return now_s - self._asked_s > limit_s or (has_work and now_s - works_since_s > limit_s)

    def _lose(self, child: EngineChild) -> None:
        with self._lock:
            self._is_ready = False
            self._child = None
            is_expected = self._closing.is_set() and not self._outstanding
            self._outstanding.clear()
            self._is_busy = False
        child.kill()
        if not is_expected:
            call_back(self._on_lost)
            # The lost engine's stats no longer hold.
            call_back(self._on_outputs, [], EngineStats())
        # After the callback, because a large process takes a while to exit.
        ending = child.reap()
        with self._send_lock:
            child.disconnect()
        if not is_expected:
            logger.error("the engine process ended (%s)", ending)

    def _restart(self) -> None:
        while not self._closing.wait(self._backoff_s):
            self._backoff_s = min(2 * self._backoff_s, self._timings.max_backoff_s)
            try:
                self._launch()
            except StartupError as error:
                logger.error("the engine can not start again: %s", error)
            except Exception as error:  # noqa: BLE001 — whatever it is, it is tried once more
                logger.error("the engine can not start again: %s", place_of(error))
            else:
                logger.warning("the engine serves again")
                call_back(self._on_outputs, [], self.info.stats)
                return


def _is_of_its_loop(message: OwnersMessage) -> bool:
    """Whether the engine's loop has sent this; its other thread refuses and forwards even if a step hangs."""
    if isinstance(message, StepDone):
        return message.stats is not None
    return isinstance(message, UsageReport | SnapshotTaken)
