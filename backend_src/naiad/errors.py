"""Named errors. Each knows the Triton status a client receives for it."""

from __future__ import annotations

from typing import ClassVar, Literal

Status = Literal["INVALID_ARG", "UNAVAILABLE", "CANCELLED", "NOT_FOUND", "INTERNAL"]


class NaiadError(Exception):
    """Base of all errors whose message may be shown to a client.

    Messages name field, value and what is allowed; never a path, an address, a prompt
    or a traceback.
    """

    status: ClassVar[Status] = "INTERNAL"


class InvalidRequestError(NaiadError):
    """The client sent something that can not be served."""

    status = "INVALID_ARG"


class NoTokenPossibleError(InvalidRequestError):
    """What the client asks for excludes every token that could come next."""

    def __init__(self) -> None:
        """Name what excludes tokens."""
        super().__init__(
            "no token is possible for this request: what it asks for "
            "(allowed_token_ids, bad_words, logit_bias, min_tokens) excludes every token"
        )


class UnavailableError(NaiadError):
    """The server can not take the request now; the same request may work later."""

    status = "UNAVAILABLE"


class EngineAwayError(UnavailableError):
    """No engine serves now: it starts, or starts again, or its model is not loaded."""


class CancelledError(NaiadError):
    """The client cancelled the request."""

    status = "CANCELLED"


class InternalError(NaiadError):
    """Our own fault, confined to the request it is raised for."""


def error_with_status(status: Status, message: str) -> NaiadError:
    """The error that a status from another process stands for."""
    kinds: dict[Status, type[NaiadError]] = {
        "INVALID_ARG": InvalidRequestError,
        "UNAVAILABLE": UnavailableError,
        "CANCELLED": CancelledError,
    }
    return kinds.get(status, InternalError)(message)


class StartupError(NaiadError):
    """Something outside the code keeps Naiad from starting; the message names the remedy."""


class ConfigError(StartupError):
    """A configuration key has a value that is not allowed."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        """Name the key, the value it has and what was expected."""
        super().__init__(f"{key} = {value!r}: expected {expected}")
        self.key = key


class ModelError(StartupError):
    """A checkpoint is missing, damaged, or of a kind that is not supported."""
