"""What crosses rooms in a step: ints and lists, never tensors."""

from __future__ import annotations

from typing import Protocol

import msgspec

from naiad.errors import NaiadError, Status
from naiad.sequence import FinishReason, SamplingParams, Sequence


class ServedModel(Protocol):
    """What users of an engine need to know of its checkpoint; a `ModelConfig` has it."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text."""


class BlockChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A sequence's block table in one KV group, as far as it is new to the runner.

    Attributes:
        first: entries before this index stay; all others are replaced.
        block_ids: the entries from `first` on.
    """

    first: int
    block_ids: list[int]


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """What a runner learns once of a sequence, in the step of its first row.

    After a preemption a sequence is admitted again. An admission replaces whatever the runner keeps
    under the same id.

    Attributes:
        sequence_id: names the sequence in rows, results and errors.
        params: how it is sampled.
        num_prompt_tokens: of its known tokens, how many are the prompt's.
        clone_of: a sequence whose state, as it was before this step, this one continues; None: it
            starts without tokens.
    """

    sequence_id: int
    params: SamplingParams
    num_prompt_tokens: int
    clone_of: int | None = None


class StepRow(msgspec.Struct, array_like=True, gc=False):
    """One sequence's part of one step: its tokens from `start` on, then perhaps drafts.

    Attributes:
        sequence_id: a sequence that has been admitted, in this step or before.
        start: the position of the row's first token.
        token_ids: the known tokens that are computed, at least one. The last one is `UNKNOWN_TOKEN`
            if the step before samples it and its result is not on the host yet.
        samples: the row reaches the last known token, so the model samples a new one.
        draft_token_ids: guesses that follow `token_ids` and are computed with them; the model keeps
            those at the beginning that it agrees with. Only with `samples`.
        earlier_token_ids: the known tokens right before `start` that no row has brought yet: a prefix
            hit's, or drafts that were accepted.
        block_changes: for each KV group how the block table changes before the row is computed; empty:
            in no group; a single one holds for all groups.
    """

    sequence_id: int
    start: int
    token_ids: list[int]
    samples: bool
    draft_token_ids: tuple[int, ...] = ()
    earlier_token_ids: tuple[int, ...] = ()
    block_changes: tuple[BlockChange, ...] = ()

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

    A runner applies it in the order of its fields.

    Attributes:
        ended: ids of sequences that have ended or were preempted since the last step with rows: the
            runner forgets them.
        admissions: sequences that are new to the runner.
        block_copies: for each KV group (from, to) blocks, to be copied in order before the rows are
            computed; empty: there are none.
        rows: one for each sequence that computes something.
        is_projected: the step was made while the one before was under way; see `StepRow.token_ids`.
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


class ModelOutput(msgspec.Struct):
    """What the model made of a step.

    Attributes:
        sampled_token_ids: sequence_id → the new ids, for each sequence with `samples`: the accepted
            drafts and one more.
        errors: sequence_id → why its row failed alone: an `InternalError` (NaN logits, …), and
            then its KV is not to be trusted, or an `InvalidRequestError`.
        log_probs: sequence_id → those of its new ids, for sequences that asked.
        context_logits: sequence_id → little-endian float32 `[num_positions, vocab_size]`, the logits of
            the prompt positions that the step computed, for sequences that asked.
        generation_logits: sequence_id → little-endian float32 `[vocab_size]` each, the model's own
            at the new ids' places, for sequences that asked.
        candidates: sequence_id → (id, log-probability) of the best tokens, best first, for beams;
            of the logits' softmax after all processors. A beam has no sampled id.
    """

    sampled_token_ids: dict[int, list[int]]
    errors: dict[int, NaiadError] = {}
    log_probs: dict[int, list[TokenLogProbs]] = {}
    context_logits: dict[int, bytes] = {}
    generation_logits: dict[int, list[bytes]] = {}
    candidates: dict[int, list[tuple[int, float]]] = {}


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
