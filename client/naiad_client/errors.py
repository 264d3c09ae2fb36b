"""The error that the client raises."""

from __future__ import annotations


class ServerError(Exception):
    """The server refused or failed the request, or cannot be reached.

    The text is the server's own message. `status` is the gRPC status name ("UNAVAILABLE", …)
    when the whole call failed, "" when the server put the error into the stream.
    """

    def __init__(self, message: str, status: str = "") -> None:
        """Keep the server's message and, if there was one, the status of the call."""
        super().__init__(message)
        self.status = status
