"""Calls of a client's callbacks: a fault in one must not end the thread that reads the engine's messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec

from naiad.errors import place_of
from naiad.outputs import RequestOutput, Timings, error_output

_Params = ParamSpec("_Params")

logger = logging.getLogger(__name__)


def call_back(callback: Callable[_Params, None], *args: _Params.args, **kwargs: _Params.kwargs) -> bool:
    """Call a callback, and log what it raises; return whether it raised nothing."""
    try:
        callback(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 — whatever it is, the messages that follow must be read
        logger.error("what the engine has sent could not be taken: %s", place_of(error))
        return False
    return True


def failures_of(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """The last outputs of sequences that can not go on because these outputs of theirs were not taken."""
    ids = dict.fromkeys(output.sequence_id for output in outputs)
    message = "internal error while taking an output"
    return [error_output(each, "INTERNAL", message, Timings()) for each in ids]
