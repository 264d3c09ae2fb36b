"""Named errors. Each has the Triton status that a client receives for it."""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import ClassVar, Literal

# Refusals of a full queue begin like the message of the server's own queue, because clients look for that.
QUEUE_IS_FULL = "Exceeds maximum queue size, the queue is full"
# Without the limit: what reaches an engine is only what was left of it, which no client has sent.
NOT_STARTED = "timeout: the request was not started within its time limit"

_MAX_FRAMES = 4

Status = Literal["INVALID_ARG", "UNAVAILABLE", "CANCELLED", "NOT_FOUND", "INTERNAL"]


class NaiadError(Exception):
    """Base of all errors whose message may be shown to a client.

    A message names the field, its value and what is allowed, never a path, an address, a prompt
    or a traceback.
    """

    status: ClassVar[Status] = "INTERNAL"


class InvalidRequestError(NaiadError):
    """The client sent something that cannot be served."""

    status = "INVALID_ARG"


class NoTokenPossibleError(InvalidRequestError):
    """The request excludes every token that could come next."""

    def __init__(self) -> None:
        """Name the fields that exclude tokens."""
        super().__init__(
            "no token is possible for this request: what it asks for "
            "(a grammar, allowed_token_ids, bad_words, logit_bias, min_tokens) excludes every token"
        )


class UnavailableError(NaiadError):
    """The server cannot accept the request now; the same request may work later."""

    status = "UNAVAILABLE"


class EngineAwayError(UnavailableError):
    """No engine is serving: it is starting or restarting, or its model is not loaded."""


class CancelledError(NaiadError):
    """The client cancelled the request."""

    status = "CANCELLED"


class InternalError(NaiadError):
    """A fault of ours, confined to the request for which it is raised."""


class EngineLostError(InternalError):
    """The engine process ended while it worked for the request; it restarts by itself."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__("the engine process ended while this request was running; it restarts by itself")


def error_with_status(status: Status, message: str) -> NaiadError:
    """Make the error for a status that another process reported."""
    kinds: dict[Status, type[NaiadError]] = {
        "INVALID_ARG": InvalidRequestError,
        "UNAVAILABLE": UnavailableError,
        "CANCELLED": CancelledError,
    }
    return kinds.get(status, InternalError)(message)


def place_of(error: BaseException) -> str:
    """Describe a fault of ours for the log: its type, and the lines that led to it, the innermost first.

    Its message is left out, because it may hold a part of what a client has sent.
    """
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    lines = [f"{'/'.join(PurePath(each.filename).parts[-2:])}:{each.lineno}" for each in reversed(frames)]
    return f"{type(error).__name__} at {' < '.join(lines) or 'an unknown place'}"


class StartupError(NaiadError):
    """Something outside the code prevents Naiad from starting; the message names the remedy."""


class ConfigError(StartupError):
    """A configuration key has a value that is not allowed."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        """Name the key, its value and what was expected."""
        super().__init__(f"{key} = {value!r}: expected {expected}")
        self.key = key


class ModelError(StartupError):
    """A checkpoint is missing, damaged, or of a kind that is not supported."""
