"""Drafts by a model: one with a checkpoint of its own, or the target's own first layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec

from naiad.errors import InternalError, place_of
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.slots import slots_of
from naiad.outputs import Admission, BlockChange, ModelOutput, StepBatch, StepRow
from naiad.sequence import SamplingParams, Sequence
from naiad.speculation.draft_slots import DraftSlots
from naiad.speculation.drafter import MAX_IN_STEP

# In each step the draft model reads at most this many tokens of texts with many unread tokens.
MAX_CAUGHT_UP_TOKENS = 256
# After this many consecutive steps with a pass that raises, the draft model is no longer used.
_MAX_RAISED = 3

logger = logging.getLogger(__name__)


class DraftRunner(Protocol):
    """Computes steps of the draft model, like `naiad.model_runner.paged_model.PagedModel`.

    Its cache has the same block ids as the target's.
    """

    def run(self, step: StepBatch) -> ModelOutput:
        """Compute the rows: those that sample get an id or an error; other rows may fail too."""

    def clear_slots(self, slots: list[list[int]]) -> None:
        """Overwrite these slots of each KV group, after a row that used them has failed."""


@dataclass(slots=True)
class _Sent:
    """What the runner has received of a sequence.

    Attributes:
        num_tokens: how many of its first known tokens.
        block_tables: its block tables when its last row was made.
    """

    num_tokens: int = 0
    block_tables: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """One sequence's draft in the making.

    Attributes:
        num_wanted: maximum number of draft tokens.
        view_id: the runner's id for the clone on which the draft grows.
        token_ids: the draft so far.
    """

    sequence: Sequence
    num_wanted: int
    view_id: int
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether it has the requested length or ends with a stop id."""
        if not self.token_ids:
            return False
        ends = self.token_ids[-1] in self.sequence.params.stop_token_ids
        return ends or len(self.token_ids) >= self.num_wanted


class ModelDrafter:
    """Drafts with a smaller model.

    The draft model samples each draft token as the target will: with the sequence's parameters and
    processors, and with its noise, which depends on seed, position and token id alone. So the two agree
    as often as two draws with shared noise can (see `sampling.verification`).

    The runner keeps each sequence's known tokens under the sequence's own id. The draft grows on a
    clone, which is dropped afterwards.

    All sequences draft together, one pass for each place in the draft. The first pass also reads the
    tokens that became known since the last draft. A sequence with many unread tokens, because its prompt
    is new or because it had no drafts for a while, reads a limited number of them in each step and
    drafts once it has caught up.

    Failures here do not reach the target: a sequence whose draft computation yields numbers that are
    not finite gets no more drafts, and a model whose passes raise repeatedly is no longer used.

    Attributes:
        num_failures: number of passes that raised and of sequences whose numbers were not finite.
    """

    is_free: ClassVar[bool] = False

    def __init__(
        self,
        runner: DraftRunner,
        kv_cache: KVCacheManager,
        slots: DraftSlots | None,
        max_caught_up_tokens: int = MAX_CAUGHT_UP_TOKENS,
    ) -> None:
        """Start without sequences.

        Args:
            runner: the draft model, with a cache that has the same block ids.
            kv_cache: allocates blocks for drafts, as far as blocks are free.
            slots: the draft fills of the model's own cache; None: it shares the target's KV.
            max_caught_up_tokens: tokens that sequences with many unread ones may read in a step, ≥ 1.
        """
        self._runner = runner
        self._kv_cache = kv_cache
        self._slots = slots
        self._max_caught_up_tokens = max_caught_up_tokens
        self._sent: dict[int, _Sent] = {}
        # Ids whose state the runner drops with its next step.
        self._ended: list[int] = []
        self._failed: set[int] = set()
        self._num_raised = 0
        self.num_failures = 0

    def num_unread(self, sequence: Sequence) -> int | None:
        """Number of unread tokens, as `CostlyDrafter` describes.

        Also None before the first output token, which must not wait for a draft.
        """
        is_off = self._num_raised >= _MAX_RAISED or sequence.sequence_id in self._failed
        if is_off or sequence.num_output_tokens == 0:
            return None
        if self._slots is None:
            is_ready = (
                sequence.num_computed_tokens == sequence.num_tokens - 1 and not self._kv_cache.has_copies
            )
            return 0 if is_ready else None
        return self._slots.num_missing(sequence)

    def propose(self, sequences: list[Sequence], num_tokens: list[int]) -> list[list[int]]:
        """Draft for sequences whose `num_unread` is not None, as `Drafter` describes."""
        drafts = [
            self._begin(sequence, num, -1 - index)
            for index, (sequence, num) in enumerate(zip(sequences, num_tokens, strict=True))
        ]
        pending = [draft for draft in drafts if draft.num_wanted > 0]
        num_left, num_raised = self._max_caught_up_tokens, self._num_raised
        while pending:
            step = StepBatch()
            drafting: list[_Draft] = []
            for draft in pending:
                row, num_read = self._next_row(draft, step.admissions, num_left)
                num_left -= num_read
                if row is not None:
                    step.rows.append(row)
                    drafting.append(draft)
            pending = self._pass(step, drafting) if drafting else []
        self._ended += [draft.view_id for draft in drafts if draft.token_ids]
        if self._num_raised == num_raised:
            self._num_raised = 0
        return [draft.token_ids for draft in drafts]

    def forget(self, sequence: Sequence) -> None:
        """Release the state of a sequence that has ended, as `Drafter` describes."""
        self._failed.discard(sequence.sequence_id)
        if self._sent.pop(sequence.sequence_id, None) is not None:
            self._ended.append(sequence.sequence_id)

    def _begin(self, sequence: Sequence, num_tokens: int, view_id: int) -> _Draft:
        num_held = self._kv_cache.extend(sequence, sequence.num_tokens + num_tokens) - sequence.num_tokens
        return _Draft(sequence, min(num_tokens, num_held), view_id)

    def _next_row(
        self, draft: _Draft, admissions: list[Admission], num_left: int
    ) -> tuple[StepRow | None, int]:
        """The draft's row in the next pass, if any, and how many of `num_left` catch-up tokens it reads."""
        sequence = draft.sequence
        num_known = sequence.num_tokens
        if draft.token_ids:
            return self._draft_row(draft, admissions), 0
        if self._slots is None:
            return self._known_row(sequence, num_known - 1, num_known, admissions), 0
        start, end = self._slots.missing(sequence)
        num_read = 0
        if num_known - start > MAX_IN_STEP:
            num_read = min(end - start, num_left)
            end = start + num_read
        if end == start:
            return None, 0
        self._slots.fill(sequence, start, end)
        return self._known_row(sequence, start, end, admissions), num_read

    def _known_row(self, sequence: Sequence, start: int, end: int, admissions: list[Admission]) -> StepRow:
        """A row of known tokens, with the earlier tokens and blocks that the runner does not have yet."""
        sequence_id, tables = sequence.sequence_id, self._tables(sequence)
        sent = self._sent.get(sequence_id)
        if sent is None:
            sent = self._sent[sequence_id] = _Sent()
            params = _sampling_alone(sequence.params)
            admissions.append(Admission(sequence_id, params, sequence.num_prompt_tokens))
        row = StepRow(sequence_id, start, sequence.token_ids[start:end], end == sequence.num_tokens)
        row.earlier_token_ids = tuple(sequence.token_ids[sent.num_tokens : start])
        if tables != sent.block_tables:
            old_tables = sent.block_tables or [[] for _ in tables]
            row.block_changes = tuple(_change(old, new) for old, new in zip(old_tables, tables, strict=True))
            sent.block_tables = [table.copy() for table in tables]
        sent.num_tokens = max(sent.num_tokens, end)
        return row

    def _draft_row(self, draft: _Draft, admissions: list[Admission]) -> StepRow:
        """The row of the draft's last token, which samples the one after it."""
        sequence, token_ids = draft.sequence, draft.token_ids
        position = sequence.num_tokens + len(token_ids) - 1
        row = StepRow(draft.view_id, position, [token_ids[-1]], True)
        if len(token_ids) == 1:
            params = _sampling_alone(sequence.params)
            admissions.append(
                Admission(draft.view_id, params, sequence.num_prompt_tokens, sequence.sequence_id)
            )
            row.block_changes = tuple(BlockChange(0, table.copy()) for table in self._tables(sequence))
        return row

    def _pass(self, step: StepBatch, drafting: list[_Draft]) -> list[_Draft]:
        """Compute one pass.

        Returns:
            The drafts that continue; none if a row has failed, because others may share its blocks.
        """
        step.ended, self._ended = self._ended, []
        try:
            output = self._runner.run(step)
        except AssertionError:
            raise  # our own bug
        except Exception as raised:  # noqa: BLE001 — of torch, of compiling a kernel, …: the target goes on
            logger.error("the draft model failed, this step goes on without drafts: %s", place_of(raised))
            self._give_up(step, drafting)
            return []
        going_on = []
        has_failed = False
        for row, draft in zip(step.rows, drafting, strict=True):
            error = output.errors.get(row.sequence_id)
            if isinstance(error, InternalError):
                has_failed = True
                self._failed.add(draft.sequence.sequence_id)
                self.num_failures += 1
                self._discard(row, draft)
            elif error is None:
                draft.token_ids += output.sampled_token_ids.get(row.sequence_id, [])
                if not draft.is_done:
                    going_on.append(draft)
        return [] if has_failed else going_on

    def _give_up(self, step: StepBatch, drafting: list[_Draft]) -> None:
        """Handle a pass that raised: no more drafts in this step, and none at all after some such steps."""
        self.num_failures += 1
        self._num_raised += 1
        if self._num_raised >= _MAX_RAISED:
            logger.error("the draft model failed %d times in succession: no more drafts", _MAX_RAISED)
        # The runner may or may not have applied the step.
        self._ended += step.ended
        for row, draft in zip(step.rows, drafting, strict=True):
            self._discard(row, draft)
            self._ended.append(row.sequence_id)
            self._sent.pop(row.sequence_id, None)

    def _discard(self, row: StepRow, draft: _Draft) -> None:
        """Discard the KV that a row wrote, and clear it: unwritten slots of a block must be finite."""
        sequence = draft.sequence
        if self._slots is not None and row.start < sequence.num_tokens:
            self._slots.empty(sequence, row.start, row.end)
        size = self._kv_cache.block_size
        self._runner.clear_slots(
            [slots_of(table, row.start, row.end, size) for table in self._tables(sequence)]
        )

    def _tables(self, sequence: Sequence) -> list[list[int]]:
        """The block tables of the KV groups whose blocks the draft model's layers use."""
        return sequence.block_tables if self._slots is None else [sequence.block_table]


def _change(old: list[int], new: list[int]) -> BlockChange:
    """The change from one block table to another; usually only the last entries differ."""
    num_same = len(old) if new[: len(old)] == old else 0
    return BlockChange(num_same, new[num_same:])


def _sampling_alone(params: SamplingParams) -> SamplingParams:
    """The parameters without those that only add to the output."""
    if params.num_log_probs < 0 and not params.describes_prompt and not params.returns_generation_logits:
        return params
    return msgspec.structs.replace(
        params,
        num_log_probs=-1,
        num_prompt_log_probs=-1,
        returns_context_logits=False,
        returns_generation_logits=False,
    )
