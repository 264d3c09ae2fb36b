"""What distinguishes models whose requests one engine serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from naiad.triton_server.request_limits import ModelLimits
from naiad.triton_server.request_reader import (
    GenerateRequest,
    RequestSource,
    StopRequest,
    read_request,
)
from naiad.triton_server.response_stream import ResponseBuilder
from naiad.triton_server.response_tensors import response_tensors


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How requests of a model are read, and what becomes of their outputs.

    Attributes:
        read: a request as its client sent it → what was asked for, or a NaiadError.
        build: the tensors of a response.
        has_detokenizer: a row with text goes through a model that acknowledges chunks and answers probes.
        cancel_message: of the error that a cancelled request ends with; "": it ends with what it has.
    """

    read: Callable[[RequestSource, ModelLimits], GenerateRequest | StopRequest] = read_request
    build: ResponseBuilder = response_tensors
    has_detokenizer: bool = True
    cancel_message: str = ""
