"""A request as Triton hands it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from naiad.frontend.request import GenerateRequest

Array = npt.NDArray[Any]


class RequestSource(Protocol):
    """What the reader needs of a Triton request."""

    @property
    def request_id(self) -> str:
        """The client's id; may be empty."""

    @property
    def timeout_us(self) -> int:
        """Triton's `timeout` in µs; 0 = none."""

    def parameters(self) -> Mapping[str, Any]:
        """The request parameters."""

    def tensors(self) -> Mapping[str, Array]:
        """The input tensors by name, batch dimension included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMRequest(GenerateRequest):
    """What its responses need besides.

    Attributes:
        prompt_text: stands before an unstreamed text; "" when it is excluded.
        returns_log_probs: the output `logprobs` is wanted.
        returns_cum_log_prob: the output `cumulative_logprob` is wanted.
        num_log_probs: best tokens at each place; None: no log-probabilities were asked for.
    """

    prompt_text: str
    returns_log_probs: bool
    returns_cum_log_prob: bool
    num_log_probs: int | None
