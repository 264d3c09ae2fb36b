"""Errors as the OpenAI API sends them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from naiad.errors import NaiadError
from naiad.frontend.field import FieldError

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_STATUSES = {"INVALID_ARG": 400, "NOT_FOUND": 404, "UNAVAILABLE": 503, "CANCELLED": 499}
# Seconds after which a client may try again when there is no capacity, or no engine. Drawn, so that clients
# that were refused together do not come back together.
RETRY_AFTER_S = range(1, 4)


class ErrorDetails(msgspec.Struct, kw_only=True):
    """The object `error`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success, and of an event that ends a stream early."""

    error: ErrorDetails


@dataclass
class APIError(Exception):
    """An answer that is not a success.

    Attributes:
        status: HTTP status.
        message: says what is wrong; it names the field, its value and what is allowed.
        param: the body's field that is at fault.
        code: a word that clients test for.
        headers: further headers of the answer.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def details(self) -> ErrorDetails:
        """The object `error`."""
        return ErrorDetails(
            message=self.message,
            type=_TYPES.get(self.status, "server_error"),
            param=self.param,
            code=self.code,
        )

    @property
    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(ErrorBody(self.details))


def api_error_of(error: NaiadError) -> APIError:
    """Translate an error of the engine or of a field's check."""
    status = _STATUSES.get(error.status, 500)
    headers = {"Retry-After": str(random.choice(RETRY_AFTER_S))} if status == 503 else {}
    param = error.field_name if isinstance(error, FieldError) else None
    return APIError(status, str(error), param=param, headers=headers)


def unknown_model(name: str) -> APIError:
    """The answer to a request for a model that the server does not have."""
    message = f"The model `{name[:200]}` does not exist."
    return APIError(404, message, param="model", code="model_not_found")


def too_long(num_tokens: int, max_model_len: int, param: str) -> APIError:
    """The answer to a prompt that leaves no room for a token."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens, prompt and output together. "
        f"However, your prompt has {num_tokens} tokens: at most {max_model_len - 1} are allowed."
    )
    return APIError(400, message, param=param, code="context_length_exceeded")
