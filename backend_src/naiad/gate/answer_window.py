"""How much of answers a client takes: of one stream, or of all that a connection has."""

from __future__ import annotations

from naiad.gate.http2_frames import FLOW_CONTROL_ERROR, MAX_WINDOW, ConnectionFaultError

# What counts as reading: a client that takes less than this holds its call up on purpose.
READING_BYTES = 16 << 10


class AnswerWindow:
    """The window of HTTP/2's flow control for what goes to a client, as the client and as the server know it.

    They differ after the gate has sent the client something of its own, of which the server knows nothing.
    What the client grants is then kept from the server until both agree again.

    Attributes:
        client: bytes that the client still takes; negative after it has made its window smaller.
        server: bytes that the server believes the client takes.
    """

    __slots__ = ("_num_granted", "_num_granted_then", "_waits_since_s", "client", "server")

    def __init__(self, client: int, server: int) -> None:
        """Set up."""
        self.client = client
        self.server = server
        self._num_granted = self._num_granted_then = 0
        self._waits_since_s: float | None = None

    def grant(self, num_bytes: int) -> None:
        """The client has read, and takes that much more.

        Raises:
            ConnectionFaultError: HTTP/2 knows no window that large.
        """
        self._num_granted += num_bytes
        self.change(num_bytes)

    def change(self, num_bytes: int) -> None:
        """The client takes more or, with a negative number, less.

        Raises:
            ConnectionFaultError: HTTP/2 knows no window that large.
        """
        self.client += num_bytes
        if self.client > MAX_WINDOW:
            raise ConnectionFaultError(FLOW_CONTROL_ERROR, f"a window: expected at most {MAX_WINDOW} bytes")

    def take_owed(self, num_kept: int = 0) -> int:
        """Return how much the server is to be granted now, and count it as granted; 0: nothing.

        Args:
            num_kept: bytes that the server has sent already and that still wait for the client.
        """
        owed = self.client - self.server - num_kept
        if owed <= 0:
            return 0
        self.server += owed
        return owed

    def waited_s(self, now_s: float, *, is_used: bool = True) -> float:
        """Return for how long something has been waiting for a client that does not read."""
        if not is_used or self.client > 0:
            self._waits_since_s = None
            return 0.0
        if self._waits_since_s is None or self._num_granted - self._num_granted_then >= READING_BYTES:
            self._waits_since_s, self._num_granted_then = now_s, self._num_granted
        return now_s - self._waits_since_s
