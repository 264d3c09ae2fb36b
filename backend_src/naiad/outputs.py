"""What crosses rooms in a step: ints and lists, never tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from naiad.errors import NaiadError, Status
from naiad.sequence import FinishReason, Sequence


@dataclass(slots=True, frozen=True)
class ScheduledSequence:
    """A sequence's part of one step: tokens [start, start + num_scheduled_tokens).

    They are known tokens, and behind the last known one perhaps drafts.

    Attributes:
        sequence: read, never written, by the model runner.
        start: `num_computed_tokens` before the step.
        num_scheduled_tokens: ≥ 1, drafts included.
        samples: the step reaches the last known token, so a new one is sampled from it.
        draft_token_ids: the last of the row's tokens; a guess, of which the beginning that the
            model agrees with is kept. Only with `samples`.
    """

    sequence: Sequence
    start: int
    num_scheduled_tokens: int
    samples: bool
    draft_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step's work; empty when nothing can run.

    Attributes:
        scheduled: a row for each sequence that computes something.
        block_copies: (from, to) KV blocks, to be copied in order before the rows are computed.
        is_ahead: made while the step before was under way: last tokens may be unknown.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    is_ahead: bool = False

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(row.num_scheduled_tokens for row in self.scheduled)


class TokenLogProbs(msgspec.Struct, array_like=True, frozen=True):
    """Natural logarithms of probabilities at one new token's place.

    They are the model's own, of the logits before penalties, biases, temperature and filters.

    Attributes:
        log_prob: of the new token.
        top_token_ids: the best tokens, best first.
        top_log_probs: theirs.
        rank: of the new token among all, 1 = the best; 0: not told (beams).
    """

    log_prob: float
    top_token_ids: list[int] = []
    top_log_probs: list[float] = []
    rank: int = 0


@dataclass(slots=True, frozen=True)
class ModelOutput:
    """What the model made of a step.

    Attributes:
        sampled_token_ids: sequence_id → the new ids, for each sequence with `samples`: the accepted
            drafts and one more.
        errors: sequence_id → why its row failed alone: an `InternalError` (NaN logits, …), and
            then its KV is not to be trusted, or an `InvalidRequestError`.
        log_probs: sequence_id → those of its new ids, for sequences that asked.
        context_logits: sequence_id → little-endian float32 `[num_scheduled_tokens, vocab_size]`,
            the logits of the step's prompt positions, for sequences that asked.
        generation_logits: sequence_id → little-endian float32 `[vocab_size]` each, the model's own
            at the new ids' places, for sequences that asked.
        candidates: sequence_id → (id, log-probability) of the best tokens, best first, for beams;
            of the logits' softmax after all processors. A beam has no sampled id.
    """

    sampled_token_ids: dict[int, list[int]]
    errors: dict[int, NaiadError] = field(default_factory=dict)
    log_probs: dict[int, list[TokenLogProbs]] = field(default_factory=dict)
    context_logits: dict[int, bytes] = field(default_factory=dict)
    generation_logits: dict[int, list[bytes]] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


class Timings(msgspec.Struct, array_like=True, frozen=True):
    """When what happened to a sequence: seconds of the machine's monotonic clock; 0 = it did not."""

    arrival_s: float = 0.0
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step adds to one sequence, as it leaves the engine.

    One that adds nothing says that the sequence has left the queue and has no token yet.

    Attributes:
        sequence_id: whose.
        token_ids: new ids, in order; may be empty on the last output, and is where it only has started.
        window_ids: with a TextContext: ids before `token_ids` that their text depends on
            (all of them already turned into text).
        num_chars: with stop strings: characters of text that `token_ids` add (after the cut,
            when `is_cut`); −1 = not counted.
        is_cut: a stop string ended inside this output's text: only `num_chars` of it count.
        finish_reason: set on the last output of a sequence, exactly once.
        stop_reason: the stop string or the decimal id that matched.
        error_status, error_message: with FinishReason.ERROR; also with TIMEOUT, of a sequence that
            never started.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        log_probs: one for each of `token_ids`, if asked for.
        cum_log_prob: the sum over all ids sent so far, if asked for.
        context_logits: on the first output, if asked for: little-endian float32
            `[num_prompt_tokens, vocab_size]`.
        generation_logits: one for each of `token_ids`, if asked for: little-endian float32
            `[vocab_size]`.
        num_draft_tokens, num_accepted_tokens: of all steps so far.
        timings: on the last output of each sequence that the engine had taken, and on all if asked
            for; None = it refused it.
        num_blocks, num_reused_blocks: of the KV cache, that the sequence holds, and those of them
            that were there when it came; where `timings` is.
    """

    sequence_id: int
    token_ids: list[int]
    window_ids: list[int] = []
    num_chars: int = -1
    is_cut: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    error_status: Status | None = None
    error_message: str = ""
    num_cached_tokens: int = 0
    log_probs: list[TokenLogProbs] = []
    cum_log_prob: float = 0.0
    context_logits: bytes = b""
    generation_logits: list[bytes] = []
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    timings: Timings | None = None
    num_blocks: int = 0
    num_reused_blocks: int = 0

    @property
    def only_started(self) -> bool:
        """Whether this is all that it says."""
        return not self.token_ids and self.finish_reason is None


def timings_of(sequence: Sequence) -> Timings:
    """What is known of a sequence until now."""
    return Timings(
        sequence.arrival_s, sequence.first_scheduled_s, sequence.first_token_s, sequence.last_token_s
    )


def error_output(
    sequence_id: int, status: Status, message: str, timings: Timings | None = None
) -> RequestOutput:
    """The last output of a sequence that ends with an error."""
    return RequestOutput(
        sequence_id,
        [],
        finish_reason=FinishReason.ERROR,
        error_status=status,
        error_message=message,
        timings=timings,
    )


class MemoryUse(msgspec.Struct, array_like=True, frozen=True):
    """Bytes that the engine's process holds; pinned ones are the processor's, for transfers to a GPU."""

    cpu_bytes: int = 0
    gpu_bytes: int = 0
    pinned_bytes: int = 0


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and running totals of the engine after a step.

    Totals have names that begin with `total_`. Queried and hit tokens are those that the prefix cache
    was asked for and had. Accepted draft tokens are told by their place in the draft. Paused
    sequences wait again after a preemption. Late compiles are kernels that were compiled since the
    start. `num_context_tokens` are the prompt tokens that the last step computed; `timestamp_s` is
    Unix time.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    num_context_seqs: int = 0
    total_preemptions: int = 0
    total_steps: int = 0
    total_queried_tokens: int = 0
    total_hit_tokens: int = 0
    total_prompt_tokens: int = 0
    total_generation_tokens: int = 0
    total_drafts: int = 0
    total_draft_tokens: int = 0
    total_accepted_tokens_at: list[int] = []
    total_draft_failures: int = 0
    total_late_compiles: int = 0
    num_paused: int = 0
    num_context_tokens: int = 0
    timestamp_s: int = 0
    memory: MemoryUse = MemoryUse()
