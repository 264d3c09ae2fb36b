"""Acknowledgements, in which the detokenizer reports to the `llm` stub which chunks have arrived.

They do not pass through the engine, whose thread may be inside a long step. The socket is of the
sequenced-packet kind: it preserves message boundaries, and unlike a datagram socket it is not limited
to net.unix.max_dgram_qlen messages (10 by default) that its reader has not taken yet.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

from naiad.engine_process.instance import Instance, instance_number
from naiad.engine_process.unix_socket import check_socket_path, connect, listen

_ACK = struct.Struct("<QI?")
_ACCEPT_RETRY_S = 0.05


class Ack(NamedTuple):
    """One acknowledgement.

    Attributes:
        sequence_id: the sequence that the chunks belong to.
        num_chunks: number of chunks that have arrived; a probe counts as one.
        is_cancelled: whether Triton reports that the client has cancelled; False if it was not asked.
    """

    sequence_id: int
    num_chunks: int
    is_cancelled: bool


class AckSender:
    """Sends to one receiver. Never blocks, and never raises if the receiver is gone; thread-safe."""

    def __init__(self, path: Path) -> None:
        """Set up; the first `send` connects."""
        self._path = path
        self._socket: socket.socket | None = None
        self._waiting: dict[int, Ack] = {}
        self._lock = threading.Lock()

    def send(self, sequence_id: int, num_chunks: int, is_cancelled: bool) -> None:
        """Send, with acknowledgements that a full socket has delayed; without a receiver, drop all."""
        with self._lock:
            earlier = self._waiting.get(sequence_id)
            if earlier is not None:
                num_chunks += earlier.num_chunks
                is_cancelled |= earlier.is_cancelled
            self._waiting[sequence_id] = Ack(sequence_id, num_chunks, is_cancelled)
            try:
                self._send_waiting()
            except BlockingIOError:
                return
            except OSError:
                self._disconnect()
                self._send_once_more()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._disconnect()

    def _send_once_more(self) -> None:
        # The receiver may have been restarted since the last send.
        try:
            self._send_waiting()
        except BlockingIOError:
            return
        except OSError:
            self._disconnect()
            self._waiting.clear()

    def _send_waiting(self) -> None:
        if self._socket is None:
            self._socket = connect(self._path, 0.0, socket.SOCK_SEQPACKET)
        while self._waiting:
            ack = next(iter(self._waiting.values()))
            self._socket.send(_ACK.pack(*ack), socket.MSG_NOSIGNAL)
            del self._waiting[ack.sequence_id]

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class AckRouter:
    """Sends each acknowledgement to the instance that owns the sequence. For one thread."""

    def __init__(self, directory: Path, model: str) -> None:
        """Set up; `directory` is the server's runtime directory, `model` the name of the `llm` model."""
        self._directory = directory
        self._model = model
        self._senders: dict[int, AckSender] = {}

    def send(self, sequence_id: int, num_chunks: int, is_cancelled: bool) -> None:
        """Send; never blocks, and never raises if the instance is gone."""
        number = instance_number(sequence_id)
        sender = self._senders.get(number)
        if sender is None:
            self._drop_closed()
            sender = self._senders[number] = AckSender(self._path(number))
        sender.send(sequence_id, num_chunks, is_cancelled)

    def close(self) -> None:
        """Close the connections."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _drop_closed(self) -> None:
        for number in [number for number in self._senders if not self._path(number).exists()]:
            self._senders.pop(number).close()

    def _path(self, number: int) -> Path:
        return Instance(self._directory, self._model, number).ack_socket


class AckReceiver:
    """Receives from any number of senders, in the `llm` stub. Any thread may call `receive`."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`, replacing the socket of a dead receiver.

        Raises:
            StartupError: the path is too long.
            OSError: the socket cannot be created.
        """
        check_socket_path(path)
        self._path = path
        path.unlink(missing_ok=True)
        self._listener = listen(path, socket.SOCK_SEQPACKET)
        self._connections: dict[int, socket.socket] = {}
        self._arrivals = select.epoll()
        self._arrivals.register(self._listener, select.EPOLLIN)
        self._lock = threading.Lock()  # held while reading, not while waiting
        self._is_closed = False

    def fileno(self) -> int:
        """Becomes readable when `receive` would not block; for select, poll or a selector."""
        return self._arrivals.fileno()

    def receive(self, timeout_s: float = 0.0) -> list[Ack]:
        """Return the acknowledgements that have arrived, waiting up to `timeout_s` for the first.

        Packets that are not acknowledgements are dropped. Once it is closed there are none.
        """
        acks: list[Ack] = []
        try:
            arrivals = self._arrivals.poll(timeout_s)
        except ValueError:
            return acks
        has_room = True
        with self._lock:
            if self._is_closed:
                return acks
            for descriptor, _ in arrivals:
                connection = self._connections.get(descriptor)
                if connection is None:
                    has_room = self._accept(acks)
                else:
                    self._read(connection, acks)
        if not has_room:
            # The listener stays readable, so a caller that waits would spin.
            time.sleep(min(timeout_s, _ACCEPT_RETRY_S))
        return acks

    def close(self) -> None:
        """Close all sockets and remove the file."""
        with self._lock:
            self._is_closed = True
            for each in (self._listener, *self._connections.values()):
                each.close()
            self._arrivals.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, acks: list[Ack]) -> bool:
        """Accept the senders that wait; return False if there was no room for one."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError:
                return False
            connection.setblocking(False)
            try:
                self._arrivals.register(connection, select.EPOLLIN)
            except OSError:
                # The machine has no room for it; the sender connects again.
                connection.close()
                continue
            self._connections[connection.fileno()] = connection
            self._read(connection, acks)

    def _read(self, connection: socket.socket, acks: list[Ack]) -> None:
        try:
            while packet := connection.recv(_ACK.size + 1):
                if len(packet) == _ACK.size:
                    acks.append(Ack(*_ACK.unpack(packet)))
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        self._arrivals.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()
