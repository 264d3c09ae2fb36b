"""Reads the head of an HTTP request: its first line and its headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError

END = b"\r\n\r\n"
_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])")
_FIELD = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*((?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?)[ \t]*"
)
_LENGTH = re.compile(r"[0-9]{1,12}")
# Of these nobody may send two: it would depend on the reader which one counts.
_SINGLE = {
    "host",
    "content-length",
    "transfer-encoding",
    "content-type",
    "content-encoding",
    "inference-header-content-length",
    "expect",
    "connection",
    "origin",
}


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request.

    Attributes:
        method: in capital letters, as it was sent.
        target: what was asked for, not decoded.
        is_http_10: whether it is HTTP/1.0, not HTTP/1.1.
        headers: by name in small letters; one that comes several times is a list.
    """

    method: str
    target: str
    is_http_10: bool
    headers: Mapping[str, str]

    @property
    def closes(self) -> bool:
        """Whether the client expects the connection to be closed after the answer."""
        return self.is_http_10 or "close" in self.headers.get("connection", "").lower()

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return "transfer-encoding" in self.headers

    def content_length(self) -> int:
        """Return the number of bytes of a body that does not come in chunks."""
        return int(self.headers.get("content-length", "0"))


def read_head(raw: bytes, limits: Limits) -> RequestHead:
    """Read the head, without the empty line at its end.

    Raises:
        RefusedError: it is not what HTTP allows, or could be understood in two ways.
    """
    first, *lines = raw.decode("latin-1").split("\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise RefusedError(400, "the first line is no request of HTTP/1.1 or HTTP/1.0")
    if len(lines) > limits.max_headers:
        raise RefusedError(431, f"{len(lines)} headers: expected at most {limits.max_headers}")
    headers: dict[str, str] = {}
    for text in lines:
        field = _FIELD.fullmatch(text)
        if field is None:
            raise RefusedError(400, "a header is malformed")
        name = field[1].lower()
        if name in headers and name in _SINGLE:
            raise RefusedError(400, f"{field[1][:40]} is there twice")
        headers[name] = f"{headers[name]},{field[2]}" if name in headers else field[2]
    head = RequestHead(line[1], line[2], line[3] == "0", headers)
    _check_framing(head, limits)
    return head


def _check_framing(head: RequestHead, limits: Limits) -> None:
    """Refuse a body whose end is not certain, and one that is too large."""
    headers = head.headers
    if "host" not in headers and not head.is_http_10:
        raise RefusedError(400, "there is no Host")
    length = headers.get("content-length", "0")
    if head.is_chunked:
        if headers["transfer-encoding"].lower() != "chunked" or head.is_http_10:
            raise RefusedError(501, "Transfer-Encoding: expected chunked, in HTTP/1.1")
        if "content-length" in headers:
            raise RefusedError(400, "Content-Length and Transfer-Encoding: expected one of the two")
    elif not _LENGTH.fullmatch(length):
        raise RefusedError(400, "Content-Length is no number of bytes")
    if int(length) > limits.max_body_bytes:
        raise too_large(limits)


def too_large(limits: Limits) -> RefusedError:
    """The refusal of a body that is too large."""
    return RefusedError(413, f"the body is too large: expected at most {limits.max_body_bytes} bytes")
