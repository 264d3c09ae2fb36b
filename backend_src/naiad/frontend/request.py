"""A request once it has been read: its rows, and which outputs its client has requested."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.sequence import BeamParams, KVRetention, SamplingParams, TextContext


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
    outputs: RequestedOutputs
    joins_sequences: bool = False


@dataclass(frozen=True, slots=True)
class StopRequest:
    """`stop` = true: cancel every live request of this id."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutputs:
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
