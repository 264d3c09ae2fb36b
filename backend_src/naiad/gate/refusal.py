"""The answer to a request that does not pass."""

from __future__ import annotations

import http

import msgspec

from naiad.errors import NaiadError


class RefusedError(NaiadError):
    """A request does not pass.

    Attributes:
        http_status: the status of the answer.
        headers: further headers of the answer.
    """

    def __init__(self, http_status: int, message: str, headers: str = "") -> None:
        """Set up; each of the headers ends with a line break."""
        super().__init__(message)
        self.http_status = http_status
        self.headers = headers

    def answer(self, *, closes: bool) -> bytes:
        """Return the response, in the form of Triton's errors; `closes`: the connection is closed then."""
        body = msgspec.json.encode({"error": str(self)})
        head = f"HTTP/1.1 {self.http_status} {http.HTTPStatus(self.http_status).phrase}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{self.headers}"
        head += "Connection: close\r\n\r\n" if closes else "\r\n"
        return head.encode() + body
