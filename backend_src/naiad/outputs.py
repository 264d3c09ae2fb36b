"""The data of a step that the packages exchange: ints and lists, never tensors."""

from __future__ import annotations

from typing import Protocol

import msgspec

from naiad.errors import NaiadError, Status
from naiad.sequence import UNKNOWN_TOKEN, FinishReason, SamplingParams, Sequence


class ServedModel(Protocol):
    """What users of an engine need to know of its checkpoint; a `ModelConfig` has it."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text."""


class BlockChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The part of a sequence's block table in one KV group that the runner does not have yet.

    Attributes:
        first: entries before this index are kept; all others are replaced.
        block_ids: the entries from `first` on.
    """

    first: int
    block_ids: list[int]


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """What the runner receives once for each sequence, in the step of the sequence's first row.

    A preempted sequence is admitted again. An admission replaces any state that the runner keeps
    under the same id.

    Attributes:
        sequence_id: identifies the sequence in rows, results and errors.
        params: how it is sampled.
        num_prompt_tokens: how many of its known tokens belong to the prompt.
        clone_of: the sequence whose state before this step is copied to start this one; None: it
            starts without tokens.
    """

    sequence_id: int
    params: SamplingParams
    num_prompt_tokens: int
    clone_of: int | None = None


class StepRow(msgspec.Struct, array_like=True, gc=False):
    """One sequence's part of one step: its tokens from `start` on, then any draft tokens.

    Attributes:
        sequence_id: a sequence that was admitted in this step or an earlier one.
        start: the position of the row's first token.
        token_ids: the known tokens to compute, at least one. The last one is `UNKNOWN_TOKEN` if the
            previous step samples it and the result is not on the host yet.
        samples: the row reaches the last known token, so the model samples a new one.
        draft_token_ids: draft tokens that follow `token_ids` and are computed with them; the longest
            prefix that the model agrees with is accepted. Only with `samples`.
        earlier_token_ids: the known tokens right before `start` that no earlier row contained: those
            of a prefix cache hit, or accepted drafts.
        block_changes: for each KV group, how the block table changes before the row is computed.
            Empty: it changes in no group. A single entry applies to all groups.
        next_token_id: the prompt token after `token_ids`, if the log-probabilities of the prompt are
            requested and the row ends inside the prompt.
    """

    sequence_id: int
    start: int
    token_ids: list[int]
    samples: bool
    draft_token_ids: tuple[int, ...] = ()
    earlier_token_ids: tuple[int, ...] = ()
    block_changes: tuple[BlockChange, ...] = ()
    next_token_id: int = UNKNOWN_TOKEN

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the row computes, drafts included."""
        return len(self.token_ids) + len(self.draft_token_ids)

    @property
    def known_end(self) -> int:
        """The position after the row's last known token."""
        return self.start + len(self.token_ids)

    @property
    def end(self) -> int:
        """The position after the row's last token, drafts included."""
        return self.start + len(self.token_ids) + len(self.draft_token_ids)


class StepBatch(msgspec.Struct, array_like=True):
    """One step's work as plain data; without rows there is nothing to compute.

    The runner applies the fields in their order.

    Attributes:
        ended: ids of sequences that have ended or were preempted since the last step with rows; the
            runner drops their state.
        admissions: sequences that are new to the runner.
        block_copies: for each KV group the (source, destination) blocks that are copied, in order,
            before the rows are computed; empty: none.
        rows: one for each sequence that computes something.
        is_projected: the step was made while the previous one was still computed; see
            `StepRow.token_ids`.
    """

    ended: list[int] = []
    admissions: list[Admission] = []
    block_copies: list[list[tuple[int, int]]] = []
    rows: list[StepRow] = []
    is_projected: bool = False

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(row.num_scheduled_tokens for row in self.rows)


class TokenLogProbs(msgspec.Struct, array_like=True, frozen=True):
    """Natural log-probabilities at the position of one token, which is new or belongs to the prompt.

    They are computed from the model's own logits, before penalties, biases, temperature and filters. For
    beams they are what the search adds up; see `ModelOutput.candidates`.

    Attributes:
        log_prob: the token's log-probability.
        top_token_ids: the most probable tokens, best first.
        top_log_probs: the log-probabilities of `top_token_ids`.
        rank: the token's rank in the vocabulary, 1 = the most probable; 0: not reported (beams).
    """

    log_prob: float
    top_token_ids: list[int] = []
    top_log_probs: list[float] = []
    rank: int = 0


class ModelOutput(msgspec.Struct):
    """The result of a step.

    Attributes:
        sampled_token_ids: sequence_id → the new ids, for each row with `samples`: the accepted
            drafts and one more.
        errors: sequence_id → the error that confines a failure to this row: an `InternalError` (NaN
            logits, …), after which its KV must not be used, or an `InvalidRequestError`.
        log_probs: sequence_id → one entry for each new id, where requested.
        prompt_log_probs: sequence_id → one entry for each prompt token that follows a token of the step's
            row, where requested.
        context_logits: sequence_id → little-endian float32 `[num_positions, vocab_size]`, the logits of
            the prompt positions that the step computed, where requested.
        generation_logits: sequence_id → for each new id the model's own logits, little-endian float32
            `[vocab_size]`, where requested.
        candidates: sequence_id → (id, log-probability) of the best tokens, best first, for beams. The
            logits processors act on the log-probabilities, and nothing normalises these afterwards, so
            they may be above 0. Beams have no sampled id.
    """

    sampled_token_ids: dict[int, list[int]]
    errors: dict[int, NaiadError] = {}
    log_probs: dict[int, list[TokenLogProbs]] = {}
    prompt_log_probs: dict[int, list[TokenLogProbs]] = {}
    context_logits: dict[int, bytes] = {}
    generation_logits: dict[int, list[bytes]] = {}
    candidates: dict[int, list[tuple[int, float]]] = {}


class Timings(msgspec.Struct, array_like=True, frozen=True):
    """Times of a sequence's events, in seconds on the machine's monotonic clock; 0 = not happened."""

    arrival_s: float = 0.0
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step adds to one sequence, as it leaves the engine.

    An output without content reports that the sequence has left the queue and has no token yet.

    Attributes:
        sequence_id: the sequence that the output belongs to.
        token_ids: new ids, in order; may be empty on the last output, and is empty if the sequence
            has only started.
        window_ids: with a TextContext: the ids before `token_ids` that their text depends on
            (all of them already turned into text).
        num_chars: with stop strings: characters of text that `token_ids` add (after the cut,
            when `is_cut`); −1 = not counted.
        is_cut: a stop string ended inside this output's text: only its first `num_chars` count.
        finish_reason: set on the last output of a sequence, exactly once.
        stop_reason: the stop string or the decimal id that matched.
        error_status, error_message: with FinishReason.ERROR; also with TIMEOUT if the sequence
            never started.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        log_probs: one for each of `token_ids`, if requested.
        cum_log_prob: the sum over all ids sent so far, if requested.
        end_log_probs: those of the id that ended the sequence and is not one of `token_ids`, if requested.
        prompt_log_probs: on the first output after the prompt, if requested: one for each prompt token but
            the first. A sequence that ends before that has none.
        context_logits: on the first output, if requested: little-endian float32
            `[num_prompt_tokens, vocab_size]`. A sequence that ends before that has none.
        generation_logits: one for each of `token_ids`, if requested: little-endian float32
            `[vocab_size]`.
        num_draft_tokens, num_accepted_tokens: totals over all steps so far.
        timings: on the last output of each sequence that the engine accepted, and on every output if
            requested; None if the engine refused the sequence.
        num_blocks, num_reused_blocks: KV cache blocks that the sequence holds, and how many of them
            were already cached when it was admitted; set where `timings` is.
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
    end_log_probs: TokenLogProbs | None = None
    prompt_log_probs: list[TokenLogProbs] = []
    context_logits: bytes = b""
    generation_logits: list[bytes] = []
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    timings: Timings | None = None
    num_blocks: int = 0
    num_reused_blocks: int = 0

    @property
    def only_started(self) -> bool:
        """Whether the output only reports that the sequence has started."""
        return not self.token_ids and self.finish_reason is None and not self.prompt_log_probs


def timings_of(sequence: Sequence) -> Timings:
    """The times of a sequence's events so far."""
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
    """Bytes that the engine process holds; pinned memory is host memory for transfers to a GPU."""

    cpu_bytes: int = 0
    gpu_bytes: int = 0
    pinned_bytes: int = 0


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and running totals of the engine after a step.

    Names of totals begin with `total_`. Queried tokens were looked up in the prefix cache, hit tokens
    were found there. Accepted draft tokens are counted by their place in the draft. Paused sequences
    wait again after a preemption. Compiling sequences wait for their grammar; they are among those that wait,
    but not in the engine yet. Late compiles are kernels that were compiled after startup. KV events are
    changes of the prefix cache that were published; others were dropped because too many were pending.
    `num_context_tokens` counts the prompt tokens that the last step computed; `timestamp_s` is Unix
    time.
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
    num_compiling: int = 0
    total_kv_events: int = 0
    total_dropped_kv_events: int = 0
