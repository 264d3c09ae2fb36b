"""Errors of a Triton server as ours."""

from __future__ import annotations

import re

from naiad.errors import (
    EngineAwayError,
    InternalError,
    InvalidRequestError,
    NaiadError,
    UnavailableError,
)

# An error inside a stream has no status, only a message. The header with which Triton would send a status can
# crash release 24.10.
_UNAVAILABLE = re.compile(
    r"maximum queue size|try again|shutting down|is stopping|server stopped|does not answer"
    r"|not started within|unavailable|not ready|unknown model|failed to (?:connect|start)|stub process"
)
_INVALID = re.compile(
    r"expected|at most|is not supported|is required|unknown parameter|no token is possible|is refused"
)
# How gRPC's library tells, with another status than UNAVAILABLE, that a connection has ended.
_CONNECTION_ENDED = re.compile(
    r"stream removed|socket closed|connection reset|broken pipe|goaway|rst_stream|transport"
)
_MAX_CHARS = 2000
# gRPC status → the kind of error; others are internal.
_KINDS: dict[str, type[NaiadError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "UNAVAILABLE": UnavailableError,
    "RESOURCE_EXHAUSTED": UnavailableError,
    "DEADLINE_EXCEEDED": UnavailableError,
    "CANCELLED": UnavailableError,
    "NOT_FOUND": UnavailableError,
}


def error_in_stream(message: str) -> NaiadError:
    """The error that a stream reports by this message; the message tells its kind."""
    shown = message[:_MAX_CHARS]
    lower = message.lower()
    if _UNAVAILABLE.search(lower):
        return UnavailableError(shown)
    if _INVALID.search(lower):
        return InvalidRequestError(shown)
    return InternalError(shown)


def error_of_call(status: str, details: str, *, has_begun: bool) -> NaiadError:
    """The error of a call that has failed as a whole.

    Args:
        status: the name of gRPC's status, such as "UNAVAILABLE".
        details: gRPC's message.
        has_begun: whether a response came before.
    """
    kind = _KINDS.get(status, InternalError)
    if kind is InvalidRequestError:
        return InvalidRequestError(details[:_MAX_CHARS])
    if has_begun:
        return InternalError("the connection to the Triton server ended while this request was running")
    if kind is UnavailableError or _CONNECTION_ENDED.search(details.lower()):
        return server_away()
    return InternalError("the Triton server failed to answer")


def server_away() -> EngineAwayError:
    """The error of requests while the server can not be reached."""
    return EngineAwayError("the Triton server does not answer now; try again in a few seconds")
