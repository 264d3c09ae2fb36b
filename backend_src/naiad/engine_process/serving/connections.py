"""The engine process's socket: its connections, their messages, and the watch over the parent.

One I/O thread accepts, reads and finishes writes; the engine's thread takes from `Inbox` and
writes through `Connections.send`, which never blocks. The I/O thread also ends the process when its
parent or its owner is gone, even while the engine's thread is inside a long computation.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import math
import os
import selectors
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from naiad.engine_process.protocol import (
    AddRequests,
    Busy,
    ClientMessage,
    Drain,
    EngineMessage,
    Observed,
    StepDone,
    StopRequests,
    StopServing,
    client_message_decoder,
    encode_frame,
)
from naiad.engine_process.serving.queue_gate import QueueGate
from naiad.engine_process.unix_socket import listen
from naiad.errors import NaiadError, place_of
from naiad.frames import FrameBuffer
from naiad.outputs import EngineStats, error_output
from naiad.sequence import EngineRequest

EXIT_FAILED = 4
EXIT_TERMINATED = 128 + signal.SIGTERM

_PARENT_CHECK_S = 0.5
_RETRY_S = 0.05
# The kernel lacks memory for what is sent. The socket stays writable meanwhile.
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
# The owner is told at most this often whether there is work.
_BUSY_INTERVAL_S = 0.5
_WAKE = b"\0"
_PEER_CREDENTIALS = struct.Struct("3i")

logger = logging.getLogger(__name__)


class ConnectionEvent(enum.Enum):
    """What happens to a connection, apart from its messages."""

    OPENED = "opened"
    CLOSED = "closed"


class Connection:
    """One client of the engine. Compared and hashed by identity.

    Attributes:
        socket: its socket, which does not block.
        frames: what has come of its messages.
        is_owner: whether the process ends with this connection.
        last_stats: the statistics that it got last; None: none yet.
        lacks_memory: the kernel had no memory for what was to be sent last.
    """

    def __init__(self, accepted: socket.socket, is_owner: bool) -> None:
        """Take over a connected socket; when the owner closes its end, the process exits."""
        accepted.setblocking(False)
        self.socket = accepted
        self.frames = FrameBuffer()
        self.is_owner = is_owner
        self.last_stats: EngineStats | None = None
        self.lacks_memory = False
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def push(self, frame: bytes = b"") -> bool:
        """Append `frame` and write as much as the socket takes; True when nothing is left."""
        with self._lock:
            self._unsent += frame
            self.lacks_memory = False
            try:
                if self._unsent:
                    del self._unsent[: self.socket.send(self._unsent, socket.MSG_NOSIGNAL)]
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    self.lacks_memory = True
                    return False
                # The client is gone, or misses a frame: the I/O thread reads the end of its stream.
                self._unsent.clear()
                self.drop()
            return not self._unsent

    def drop(self) -> None:
        """Shut the socket down; the I/O thread then reads its end and reports CLOSED."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Inbox:
    """Messages and events that the I/O thread hands to the engine's thread."""

    def __init__(self) -> None:
        """Start empty."""
        self._items: list[tuple[Connection, ClientMessage | ConnectionEvent]] = []
        self._arrived = threading.Condition()
        self._is_woken = False

    def wake(self) -> None:
        """Let the engine's thread take, even if there are no items."""
        with self._arrived:
            self._is_woken = True
            self._arrived.notify()

    def put(self, connection: Connection, item: ClientMessage | ConnectionEvent) -> None:
        """Add and wake the engine's thread."""
        with self._arrived:
            self._items.append((connection, item))
            self._arrived.notify()

    def take(self, timeout_s: float | None) -> list[tuple[Connection, ClientMessage | ConnectionEvent]]:
        """All items in order of arrival.

        If there are none, wait up to `timeout_s` (None: for ever) or until somebody calls `wake`.
        """
        with self._arrived:
            if not self._items and timeout_s != 0:
                self._arrived.wait_for(lambda: bool(self._items) or self._is_woken, timeout_s)
            self._is_woken = False
            items, self._items = self._items, []
            return items


class Connections:
    """Owns the listening socket and all connections."""

    def __init__(self, socket_path: Path, parent_pid: int, gate: QueueGate) -> None:
        """Create the socket, for this user alone, and start to accept.

        Args:
            socket_path: where to listen; it must not exist, and its directory should have mode 0700.
            parent_pid: the process exits when this is no longer its parent. The first connection
                from that process is the owner's.
            gate: admits or refuses every request before it reaches the inbox.

        Raises:
            OSError: the socket cannot be created there.
        """
        self.inbox = Inbox()
        self._path = socket_path
        self._parent_pid = parent_pid
        self.gate = gate
        self._has_owner = False
        self._was_busy = False
        self._told_busy_s = -math.inf
        self._open: set[Connection] = set()
        self._unfinished: set[Connection] = set()
        self._listener = listen(socket_path)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        # The C-level handler writes the signal's number here even while the main thread computes.
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        threading.Thread(target=self._run, name="engine-io", daemon=True).start()

    def send(self, connection: Connection, message: EngineMessage) -> None:
        """Write what the socket takes now; the I/O thread writes the rest. Never blocks."""
        if not connection.push(encode_frame(message)):
            self._unfinished.add(connection)
            # Without it the I/O thread finds the connection `_PARENT_CHECK_S` later at most.
            with contextlib.suppress(OSError):
                self._wake_write.send(_WAKE)

    def flush(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until everything is written."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not all(each.push() for each in list(self._open)):
            time.sleep(0.005)

    def leave(self, exit_code: int) -> NoReturn:
        """Exit the process at once, without a teardown that could hang or take seconds."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        os._exit(exit_code)

    def _run(self) -> None:
        try:
            while True:
                if os.getppid() != self._parent_pid:
                    self.leave(0)
                for key, events in self._selector.select(_PARENT_CHECK_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_read:
                        self._woken()
                    else:
                        self._serve(key.data, events)
                self._watch_unfinished()
                self._tell_whether_busy()
        except BaseException as error:  # noqa: BLE001 — without this thread no messages would be read
            logger.critical("the connections' thread failed: %s", place_of(error))
        finally:
            self.leave(EXIT_FAILED)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            logger.warning("a connection could not be accepted", exc_info=True)
            # Probably out of file descriptors. The listener stays readable, so wait instead of spinning.
            time.sleep(_RETRY_S)
            return
        raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pid, uid, _gid = _PEER_CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            logger.warning("refused a connection from another user (uid %d)", uid)
            accepted.close()
            return
        connection = Connection(accepted, is_owner=not self._has_owner and pid == self._parent_pid)
        try:
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        except OSError:
            logger.warning("a connection could not be watched", exc_info=True)
            accepted.close()
            return
        self._has_owner |= connection.is_owner
        self._open.add(connection)
        self.inbox.put(connection, ConnectionEvent.OPENED)

    def _woken(self) -> None:
        if signal.SIGTERM in self._wake_read.recv(4096):
            self.leave(EXIT_TERMINATED)

    def _watch_unfinished(self) -> None:
        while self._unfinished:
            connection = self._unfinished.pop()
            if connection in self._open:
                self._watch(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _watch(self, connection: Connection, events: int) -> None:
        self._selector.modify(connection.socket, events, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            if connection.push():
                self._watch(connection, selectors.EVENT_READ)
            elif connection.lacks_memory:
                time.sleep(_RETRY_S)
        if events & selectors.EVENT_READ:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            bodies = connection.frames.receive(connection.socket)
            for body in bodies or ():
                self._take(connection, client_message_decoder.decode(body))
        except BlockingIOError:
            return
        except OSError:
            bodies = None
        except (ValueError, msgspec.DecodeError) as error:
            logger.error("dropped a connection that violates the protocol: %s", place_of(error))
            bodies = None
        if bodies is None:
            self._close(connection)

    def _take(self, connection: Connection, message: ClientMessage) -> None:
        match message:
            case AddRequests(requests):
                try:
                    self.gate.enter(requests)
                except NaiadError as error:
                    self._refuse(connection, requests, error)
                    return
            case StopRequests():
                # Only the frontends know their clients' request ids; the engine does not.
                for other in self._open - {connection}:
                    self.send(other, message)
                return
            case Observed():
                self._tell_owner(message)
                return
            case Drain() if not connection.is_owner:
                # Only the owner may end the process.
                return
            case Drain() | StopServing():
                self.gate.close("the server is shutting down")
                if isinstance(message, StopServing):
                    self.send(connection, Busy(self.gate.num_inside > 0))
        self.inbox.put(connection, message)

    def _tell_owner(self, message: EngineMessage) -> bool:
        """Send to the owner; return whether there is one."""
        owners = [each for each in self._open if each.is_owner]
        for owner in owners:
            self.send(owner, message)
        return bool(owners)

    def _tell_whether_busy(self) -> None:
        """Tell the owner if the first sequence has come, or the last one has ended."""
        is_busy, now_s = self.gate.num_inside > 0, time.monotonic()
        is_due = is_busy != self._was_busy and now_s >= self._told_busy_s + _BUSY_INTERVAL_S
        if is_due and self._tell_owner(Busy(is_busy)):
            self._was_busy, self._told_busy_s = is_busy, now_s

    def _refuse(self, connection: Connection, requests: list[EngineRequest], error: NaiadError) -> None:
        refusals = [
            error_output(sequence_id, error.status, str(error))
            for request in requests
            for sequence_id in request.sequence_ids
        ]
        self.send(connection, StepDone(refusals, None))

    def _close(self, connection: Connection) -> None:
        if connection.is_owner:
            self.leave(0)
        self._selector.unregister(connection.socket)
        self._open.discard(connection)
        connection.drop()
        connection.socket.close()
        self.inbox.put(connection, ConnectionEvent.CLOSED)
