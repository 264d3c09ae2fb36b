"""The typed request, into which every frontend reads its clients' requests; `request_builder` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from naiad.errors import InvalidRequestError
from naiad.sequence import BeamParams, EngineRequest, KVRetention, SamplingParams, TextContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutputs:
    """The outputs that a request asks for; they are the same for all of its rows.

    Attributes:
        num_log_probs: number of best tokens sent for each new token's position; 0 = none.
        num_prompt_log_probs: number of best tokens sent for each prompt token's position; −1 = not even the
            prompt token's own log-probability.
        beam_width: number of beams for each prompt; 1 = no beam search.
        num_return_sequences: number of sequences sent for each prompt, ≥ 1.
    """

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_cached_tokens: bool = False
    log_probs: bool = False
    num_log_probs: int = 0
    num_prompt_log_probs: int = -1
    context_logits: bool = False
    generation_logits: bool = False
    perf_metrics: bool = False
    num_return_sequences: int = 1
    beam_width: int = 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences for each prompt; a beam search may have more than are sent."""
        return max(self.beam_width, self.num_return_sequences)

    @property
    def num_engine_log_probs(self) -> int:
        """The value for `SamplingParams.num_log_probs`; −1 = no log-probabilities at all."""
        return self.num_log_probs if self.log_probs or self.num_log_probs else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One prompt: its ids, its parameters and, if a detokenizer follows, its text context.

    Attributes:
        tenant: who gets a fair share of the engine; None: the salt is the tenant.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextContext | None
    cache_salt: str
    tenant: str | None = None
    beam: BeamParams | None = None
    draft_token_ids: tuple[int, ...] = ()
    retention: KVRetention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request: its rows, and the outputs that it asks for.

    Attributes:
        joins_sequences: whether each row gets a single response, when all of its sequences have ended.
    """

    request_id: str
    rows: list[RequestRow]
    timeout_s: float | None
    streaming: bool
    exclude_input: bool
    outputs: RequestedOutputs
    joins_sequences: bool = False

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all rows."""
        return len(self.rows) * self.outputs.num_sequences

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(row.prompt_token_ids) for row in self.rows)

    def engine_requests(self, first_id: int) -> list[EngineRequest]:
        """Make an engine request for each row.

        Args:
            first_id: the id of the first row's first sequence; the others have the ids that follow, row by
                row.
        """
        width = self.outputs.num_sequences
        return [
            EngineRequest(
                sequence_id=start,
                sibling_ids=tuple(range(start + 1, start + width)),
                prompt_token_ids=row.prompt_token_ids,
                params=row.params,
                text=row.text,
                timeout_s=self.timeout_s,
                cache_salt=row.cache_salt,
                tenant=row.tenant,
                beam=row.beam,
                draft_token_ids=row.draft_token_ids,
                retention=row.retention,
            )
            for row, start in zip(
                self.rows, range(first_id, first_id + self.num_sequences, width), strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request with `stop` = true: cancel every live request of this id."""

    request_id: str


def stop_request(request_id: str) -> StopRequest:
    """Make the request to cancel all requests of this id.

    Raises:
        InvalidRequestError: the id is empty.
    """
    if not request_id:
        raise InvalidRequestError("A request id must be provided for request cancellation")
    return StopRequest(request_id)
