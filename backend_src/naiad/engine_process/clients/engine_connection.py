"""A client's connection to an engine process: frames out, messages in."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import msgspec

from naiad.engine_process.protocol import EngineMessage, FrameBuffer, engine_message_decoder
from naiad.engine_process.unix_socket import connect

_READ_BYTES = 1 << 18
_SEND_TIMEOUT_S = 5.0


class ProtocolError(ConnectionError):
    """The engine process sent something that is no message."""


class EngineConnection:
    """One thread receives; any thread may send, one at a time."""

    def __init__(self, path: Path) -> None:
        """Connect.

        Raises:
            OSError: nobody listens there.
        """
        self._socket = connect(path, _SEND_TIMEOUT_S)
        self._frames = FrameBuffer()

    def fileno(self) -> int:
        """Readable when `receive` does not wait; for select, poll or a selector."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            OSError: the engine does not read, or is gone. Part of the frame may be out, so the
                connection can not be used any more.
        """
        self._socket.sendall(frame, socket.MSG_NOSIGNAL)

    def receive(self) -> list[EngineMessage]:
        """The messages that are complete after the next read.

        Raises:
            ProtocolError: what came is no message.
            OSError: the engine closed the connection, or is gone.
        """
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the engine process closed its socket")
        try:
            return [engine_message_decoder.decode(body) for body in self._frames.feed(data)]
        except (ValueError, msgspec.DecodeError) as error:
            raise ProtocolError(f"the engine process does not keep to the protocol: {error}") from error

    def hang_up(self) -> None:
        """End the connection; the receiving thread then reads its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; nobody may be sending or receiving."""
        self._socket.close()
