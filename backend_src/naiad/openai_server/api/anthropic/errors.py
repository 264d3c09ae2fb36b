"""Errors as Anthropic's API sends them."""

from __future__ import annotations

import msgspec

from naiad.openai_server.api.answers import NamedEvent
from naiad.openai_server.api.errors import APIError

PATH = "/v1/messages"
REQUEST_ID = "request-id"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# No capacity, or no engine for the moment.
_STATUSES = {503: 529}


class MessageErrorDetails(msgspec.Struct):
    """The object `error`."""

    type: str
    message: str


class MessageError(NamedEvent, kw_only=True, tag="error"):
    """The body of every answer that is not a success, and the event that ends a stream early."""

    error: MessageErrorDetails
    request_id: str | None = None


def status_of(error: APIError) -> int:
    """The HTTP status of an error."""
    return _STATUSES.get(error.status, error.status)


def body_of(error: APIError, request_id: str | None = None) -> MessageError:
    """The body of an error."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessageError(error=MessageErrorDetails(kind, error.message), request_id=request_id)
