"""A request once it has been read: its rows, and which outputs its client has requested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from naiad.sequence import BeamParams, KVRetention, SamplingParams, TextContext

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
class RequestRow:
    """One row of the batch: the prompt, when a detokenizer follows its text context, and its search."""

    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextContext | None
    cache_salt: str
    beam: BeamParams | None = None
    draft_token_ids: tuple[int, ...] = ()
    retention: KVRetention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A whole request: its rows, and what the client wants to see of them.

    Attributes:
        joins_sequences: all sequences of a row have one response together, when all have ended.
    """

    request_id: str
    rows: list[RequestRow]
    timeout_s: float | None
    streaming: bool
    exclude_input: bool
    wishes: OutputWishes
    joins_sequences: bool = False


@dataclass(frozen=True, slots=True)
class StopRequest:
    """`stop` = true: cancel every live request of this id."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWishes:
    """Which outputs are sent.

    Attributes:
        num_log_probs: best tokens that are shown at each new token's place; 0 = none.
        beam_width: of each prompt's search; 1 = none.
        num_return_sequences: sequences that are sent of each prompt, ≥ 1.
    """

    finish_reason: bool
    num_input_tokens: bool
    num_output_tokens: bool
    num_cached_tokens: bool
    log_probs: bool
    num_log_probs: int
    context_logits: bool
    generation_logits: bool
    perf_metrics: bool
    num_return_sequences: int
    beam_width: int = 1

    @property
    def num_sequences(self) -> int:
        """Sequences from each prompt: of a search there are more than are sent."""
        return max(self.beam_width, self.num_return_sequences)

    @property
    def num_engine_log_probs(self) -> int:
        """What `SamplingParams.num_log_probs` must be: −1 = no log-probabilities at all."""
        return self.num_log_probs if self.log_probs or self.num_log_probs else -1


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
