"""A client's connection to an engine process: frames out, messages in."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import msgspec

from naiad.engine_process.protocol import EngineMessage, engine_message_decoder
from naiad.engine_process.unix_socket import connect
from naiad.frames import FrameBuffer

_SEND_TIMEOUT_S = 5.0


class ProtocolError(ConnectionError):
    """The engine process sent something that is not a message."""


class EngineConnection:
    """One thread receives; any thread may send, one at a time."""

    def __init__(self, path: Path, timeout_s: float = _SEND_TIMEOUT_S) -> None:
        """Connect.

        Args:
            path: the engine's socket.
            timeout_s: how long this, and each send, may take.

        Raises:
            OSError: no process listens there.
        """
        self._socket = connect(path, timeout_s)
        self._frames = FrameBuffer()

    def fileno(self) -> int:
        """Becomes readable when `receive` would not block; for select, poll or a selector."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            OSError: the engine does not read, or is gone. Part of the frame may have been sent, so
                the connection cannot be used any more.
        """
        self._socket.sendall(frame, socket.MSG_NOSIGNAL)

    def receive(self) -> list[EngineMessage]:
        """Read once and return the messages that are complete.

        Raises:
            ProtocolError: what arrived is not a message.
            OSError: the engine closed the connection, or is gone.
        """
        try:
            bodies = self._frames.receive(self._socket)
            messages = [engine_message_decoder.decode(body) for body in bodies or ()]
        except (ValueError, msgspec.DecodeError) as error:
            raise ProtocolError(f"the engine process violates the protocol: {error}") from error
        if bodies is None:
            raise ConnectionError("the engine process closed its socket")
        return messages

    def hang_up(self) -> None:
        """Shut the connection down; `receive` then raises in the receiving thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; no thread may be sending or receiving."""
        self._socket.close()
