"""The engine process's socket: connections ("doors"), their messages, and the watch over the parent.

One I/O thread accepts, reads and finishes writes; the engine's thread takes from `Inbox` and
writes through `Door.send`, which never blocks. The I/O thread also ends the process when its
parent or its owner is gone, even while the engine's thread is inside a long computation.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import selectors
import signal
import socket
import struct
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from naiad.engine_process.protocol import (
    AddRequests,
    ClientMessage,
    Drain,
    EngineMessage,
    FrameBuffer,
    StepDone,
    StopRequests,
    StopServing,
    client_message_decoder,
    encode_frame,
)
from naiad.engine_process.serving.queue_gate import QueueGate
from naiad.errors import NaiadError
from naiad.outputs import EngineStats, error_output
from naiad.sequence import EngineRequest

EXIT_FAILED = 4
EXIT_TERMINATED = 128 + signal.SIGTERM

_PARENT_CHECK_S = 0.5
_ACCEPT_RETRY_S = 0.05
_READ_BYTES = 1 << 18
_WAKE = b"\0"
_PEER_CREDENTIALS = struct.Struct("3i")

logger = logging.getLogger(__name__)


class DoorEvent(enum.Enum):
    """What happens to a door besides messages."""

    OPENED = "opened"
    CLOSED = "closed"


class Door:
    """One connection. Compared and hashed by identity."""

    def __init__(self, connection: socket.socket, is_owner: bool) -> None:
        """Take over a connected socket; the owner's end ends the process."""
        connection.setblocking(False)
        self.connection = connection
        self.frames = FrameBuffer()
        self.is_owner = is_owner
        self.last_stats: EngineStats | None = None
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def push(self, frame: bytes = b"") -> bool:
        """Write what the socket takes of what waits and `frame`; True when nothing is left."""
        with self._lock:
            self._unsent += frame
            try:
                if self._unsent:
                    del self._unsent[: self.connection.send(self._unsent, socket.MSG_NOSIGNAL)]
            except BlockingIOError:
                return False
            except OSError:
                # The peer is gone: the I/O thread reads its end and says so.
                self._unsent.clear()
            return not self._unsent

    def drop(self) -> None:
        """End the connection; the I/O thread then reads its end and reports CLOSED."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Inbox:
    """What the doors brought, handed from the I/O thread to the engine's."""

    def __init__(self) -> None:
        """Start empty."""
        self._items: list[tuple[Door, ClientMessage | DoorEvent]] = []
        self._arrived = threading.Condition()

    def put(self, door: Door, item: ClientMessage | DoorEvent) -> None:
        """Add and wake the engine's thread."""
        with self._arrived:
            self._items.append((door, item))
            self._arrived.notify()

    def take(self, timeout_s: float | None) -> list[tuple[Door, ClientMessage | DoorEvent]]:
        """All there is, in order; when empty, wait up to `timeout_s` (None: until something comes)."""
        with self._arrived:
            if not self._items and timeout_s != 0:
                self._arrived.wait_for(lambda: bool(self._items), timeout_s)
            items, self._items = self._items, []
            return items


class DoorKeeper:
    """Owns the listening socket and all doors."""

    def __init__(self, socket_path: Path, parent_pid: int, gate: QueueGate) -> None:
        """Create the socket, for this user alone, and start to accept.

        Args:
            socket_path: must not exist; its directory should be private (mode 0700).
            parent_pid: the process ends when this is no longer its parent. The first connection
                from that process is the owner's.
            gate: every request passes it before it is in the inbox.

        Raises:
            OSError: the socket can not be created there.
        """
        self.inbox = Inbox()
        self._path = socket_path
        self._parent_pid = parent_pid
        self.gate = gate
        self._has_owner = False
        self._doors: set[Door] = set()
        self._unfinished: set[Door] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self._listener.bind(str(socket_path))
        finally:
            os.umask(mask)
        self._listener.setblocking(False)
        self._listener.listen(16)
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

    def send(self, door: Door, message: EngineMessage) -> None:
        """Write now what the socket takes, leave the rest to the I/O thread. Never blocks."""
        if not door.push(encode_frame(message)):
            self._unfinished.add(door)
            with contextlib.suppress(BlockingIOError):
                self._wake_write.send(_WAKE)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is written, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not all(door.push() for door in list(self._doors)):
            time.sleep(0.005)

    def leave(self, exit_code: int) -> NoReturn:
        """End the process at once: no teardown that could hang or take seconds."""
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
        finally:
            # Only an exception leads here; a process without this thread would be deaf.
            traceback.print_exc()
            self.leave(EXIT_FAILED)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            logger.warning("a connection could not be accepted", exc_info=True)
            # Out of descriptors, probably, and the listener stays readable: do not spin.
            time.sleep(_ACCEPT_RETRY_S)
            return
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pid, uid, _gid = _PEER_CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            logger.warning("refused a connection from another user (uid %d)", uid)
            connection.close()
            return
        door = Door(connection, is_owner=not self._has_owner and pid == self._parent_pid)
        self._has_owner |= door.is_owner
        self._doors.add(door)
        self._selector.register(connection, selectors.EVENT_READ, door)
        self.inbox.put(door, DoorEvent.OPENED)

    def _woken(self) -> None:
        if signal.SIGTERM in self._wake_read.recv(4096):
            self.leave(EXIT_TERMINATED)
        while self._unfinished:
            door = self._unfinished.pop()
            if door in self._doors:
                self._selector.modify(door.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, door)

    def _serve(self, door: Door, events: int) -> None:
        if events & selectors.EVENT_WRITE and door.push():
            self._selector.modify(door.connection, selectors.EVENT_READ, door)
        if events & selectors.EVENT_READ:
            self._read(door)

    def _read(self, door: Door) -> None:
        try:
            data = door.connection.recv(_READ_BYTES)
            for body in door.frames.feed(data):
                self._take(door, client_message_decoder.decode(body))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except (ValueError, msgspec.DecodeError) as error:
            logger.error("dropped a connection that does not keep to the protocol: %s", error)
            data = b""
        if not data:
            self._close(door)

    def _take(self, door: Door, message: ClientMessage) -> None:
        match message:
            case AddRequests(requests):
                try:
                    self.gate.enter(requests)
                except NaiadError as error:
                    self._refuse(door, requests, error)
                    return
            case StopRequests():
                # Only doors know their clients' ids; the engine is not asked.
                for other in self._doors - {door}:
                    self.send(other, message)
                return
            case Drain() if not door.is_owner:
                # Only the owner may end the process.
                return
            case Drain() | StopServing():
                self.gate.close("the server is shutting down")
        self.inbox.put(door, message)

    def _refuse(self, door: Door, requests: list[EngineRequest], error: NaiadError) -> None:
        refusals = [
            error_output(sequence_id, error.status, str(error))
            for request in requests
            for sequence_id in request.sequence_ids
        ]
        self.send(door, StepDone(refusals, None))

    def _close(self, door: Door) -> None:
        if door.is_owner:
            self.leave(0)
        self._selector.unregister(door.connection)
        self._doors.discard(door)
        door.drop()
        door.connection.close()
        self.inbox.put(door, DoorEvent.CLOSED)
