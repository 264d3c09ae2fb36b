"""A model runner without a model: it stores token ids where a real one stores keys and values."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from naiad.errors import InternalError
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.slots import slots_of
from naiad.outputs import Admission, MemoryUse, ModelOutput, StepBatch, StepRow, TokenLogProbs
from naiad.sequence import UNKNOWN_TOKEN, SamplingParams


@dataclass(frozen=True)
class FakeModelConfig:
    vocab_size: int = 50
    eos_token_ids: tuple[int, ...] = (0,)


def next_token(prefix: list[int], vocab_size: int = 50) -> int:
    """The fake model: a function of the whole prefix."""
    return zlib.crc32(bytes(token % 251 for token in prefix) + str(len(prefix)).encode()) % vocab_size


def next_candidates(prefix: list[int], num: int, vocab_size: int = 50) -> list[tuple[int, float]]:
    """The fake model's best next tokens with their log-probabilities, best first."""
    scores = [
        (zlib.crc32(bytes([*(t % 251 for t in prefix), each])) % 100_003, each) for each in range(vocab_size)
    ]
    return [(token_id, -1e-4 * score) for score, token_id in sorted(scores)[:num]]


@dataclass
class FakeState:
    """What is known of a sequence from its rows: all of its known tokens, and its blocks."""

    params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)

    def advance(self, row: StepRow) -> None:
        for table, change in zip(self.block_tables, row.block_changes, strict=bool(row.block_changes)):
            assert change.first <= len(table)
            table[change.first :] = change.block_ids
        if row.earlier_token_ids:
            assert len(self.token_ids) + len(row.earlier_token_ids) == row.start
            self.token_ids += row.earlier_token_ids
        num_known = len(self.token_ids) - row.start
        assert num_known >= 0, "tokens are missing"
        assert self.token_ids[row.start : row.known_end] == row.token_ids[:num_known]
        self.token_ids += row.token_ids[num_known:]


class FakeRunner:
    """Writes each step's ids into the rows' slots and reads the prefix back through the block table.

    A wrong block table, a block shared by mistake, or KV that was never computed therefore gives
    a wrong token or fails an assertion. In KV groups with a window every row reads the tokens in its window.

    Attributes:
        failing: sequence ids whose rows fail from now on.
        cleared: the first group's block ids of each `clear_blocks`.
        num_copied_blocks: blocks copied before steps.
        num_late_compiles: the number that it reports.
        steps: the steps that were run, as lists of (sequence id, number of tokens).
        under_way: steps whose results have not been taken, at most two at a time.
        states: the state of each sequence.
        num_clones: sequences that began as clones.
        num_overlapped: steps that were launched while another was under way.
    """

    def __init__(
        self, groups: int | Sequence[KVGroupSpec], block_size: int, max_model_len: int = 10_000
    ) -> None:
        self.model_config = FakeModelConfig()
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.failing: set[int] = set()
        self.cleared: list[list[int]] = []
        self.num_copied_blocks = 0
        self.num_late_compiles = 0
        self.steps: list[list[tuple[int, int]]] = []
        self.under_way: list[StepBatch] = []
        self.num_overlapped = self.num_clones = 0
        self.states: dict[int, FakeState] = {}
        # The ids that the last step has sampled, which on a GPU the host may not know yet.
        self._newest: dict[int, int] = {}
        self._windows = [None] if isinstance(groups, int) else [group.window for group in groups]
        # For each group slot → position, token and a hash of the text up to it.
        self._slots: list[dict[int, tuple[int, int, int]]] = [{} for _ in self._windows]

    def needs_ids(self, params: SamplingParams) -> bool:
        asks = params.num_log_probs >= 0 or params.describes_prompt or params.returns_generation_logits
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return asks or penalties != (1, 0, 0) or params.num_candidates > 0

    def run(self, step: StepBatch) -> ModelOutput:
        return self.launch(step)()

    def launch(self, step: StepBatch) -> Callable[[], ModelOutput]:
        """Compute at once: a device computes in the order of the launches."""
        assert len(self.under_way) < 2
        self.num_overlapped += bool(self.under_way)
        self.under_way.append(step)
        result = self._run(step)
        self._newest = {each: token_ids[-1] for each, token_ids in result.sampled_token_ids.items()}

        def wait() -> ModelOutput:
            assert self.under_way.pop(0) is step, "results are taken in the order of the launches"
            return result

        return wait

    def _run(self, step: StepBatch) -> ModelOutput:
        self._take(step)
        for slots, copies in zip(self._slots, step.block_copies, strict=bool(step.block_copies)):
            for source, target in copies:
                self._copy(slots, source, target)
        for row in step.rows:
            self._write(row)
        for row in step.rows:
            self._check_windows(row)
        result = ModelOutput({})
        for row in step.rows:
            sequence_id, state = row.sequence_id, self.states[row.sequence_id]
            if sequence_id in self.failing:
                result.errors[sequence_id] = InternalError("the row failed")
            elif row.samples:
                text = self._text(row)
                if self._windows[0] is None:
                    assert self._read(state, len(text)) == text
                num_candidates = state.params.num_candidates
                if num_candidates:
                    allowed, excluded = state.params.allowed_token_ids, state.params.bad_words
                    result.candidates[sequence_id] = [
                        candidate
                        for candidate in next_candidates(text, self.model_config.vocab_size)
                        if (not allowed or candidate[0] in allowed) and (candidate[0],) not in excluded
                    ][:num_candidates]
                    continue
                result.sampled_token_ids[sequence_id] = self._verified(text, len(row.draft_token_ids))
            self._add_details(row, result)
        return result

    def _take(self, step: StepBatch) -> None:
        """Update the states from the step, after checking that its encoded form is equivalent."""
        assert step.rows
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepBatch) == step
        self.steps.append([(row.sequence_id, row.num_scheduled_tokens) for row in step.rows])
        for sequence_id in step.ended:
            self.states.pop(sequence_id, None)
        for admission in step.admissions:
            self.states[admission.sequence_id] = self._admitted(admission)
        for row in step.rows:
            self.states[row.sequence_id].advance(row)

    def _admitted(self, admission: Admission) -> FakeState:
        tables: list[list[int]] = [[] for _ in self._windows]
        state = FakeState(admission.params, admission.num_prompt_tokens, block_tables=tables)
        if admission.clone_of is not None:
            self.num_clones += 1
            donor = self.states[admission.clone_of]
            assert UNKNOWN_TOKEN not in donor.token_ids
            state.token_ids = donor.token_ids.copy()
        return state

    def _text(self, row: StepRow) -> list[int]:
        """Known tokens and drafts; only the last known one may be on the device alone."""
        known = self.states[row.sequence_id].token_ids
        if row.token_ids[-1] == UNKNOWN_TOKEN:
            assert not row.draft_token_ids
            # A failed row may sample anything; later rows of the sequence need the id that is set here.
            known[-1] = self._newest.get(row.sequence_id, 0)
        assert UNKNOWN_TOKEN not in known
        return [*known, *row.draft_token_ids]

    def _verified(self, text: list[int], num_drafts: int) -> list[int]:
        """The model's tokens at the drafts' positions as long as they agree with the drafts, and one more."""
        token_ids: list[int] = []
        for end in range(len(text) - num_drafts, len(text) + 1):
            token_ids.append(next_token(text[:end], self.model_config.vocab_size))
            if end == len(text) or token_ids[-1] != text[end]:
                break
        return token_ids

    def _add_details(self, row: StepRow, result: ModelOutput) -> None:
        """Add log-probabilities and logits whose values identify their token and position."""
        sequence_id, state = row.sequence_id, self.states[row.sequence_id]
        params, position = state.params, row.known_end
        if params.returns_context_logits and row.start < state.num_prompt_tokens:
            end = min(position, state.num_prompt_tokens)
            result.context_logits[sequence_id] = bytes(range(row.start, end))
        if params.num_prompt_log_probs >= 0 and row.start < state.num_prompt_tokens - 1:
            # Each entry names the token and its position.
            following = [*row.token_ids[1:], row.next_token_id][: state.num_prompt_tokens - 1 - row.start]
            assert UNKNOWN_TOKEN not in following
            result.prompt_log_probs[sequence_id] = [
                TokenLogProbs(-float(place), [token_id])
                for place, token_id in enumerate(following, row.start + 1)
            ]
        if sequence_id in result.sampled_token_ids:
            places = range(position, position + len(result.sampled_token_ids[sequence_id]))
            if params.num_log_probs >= 0:
                result.log_probs[sequence_id] = [TokenLogProbs(-float(place)) for place in places]
            if params.returns_generation_logits:
                result.generation_logits[sequence_id] = [bytes([place]) for place in places]

    @property
    def num_written_slots(self) -> int:
        """Number of slots that have been written and not cleared since."""
        return sum(map(len, self._slots))

    def memory_use(self) -> MemoryUse:
        return MemoryUse(cpu_bytes=1)

    def clear_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        self.cleared.append([*block_ids[0]])
        for slots, blocks in zip(self._slots, block_ids, strict=True):
            for block_id in blocks:
                for offset in range(self.block_size):
                    slots.pop(block_id * self.block_size + offset, None)

    def _copy(self, slots: dict[int, tuple[int, int, int]], source: int, target: int) -> None:
        self.num_copied_blocks += 1
        for offset in range(self.block_size):
            slots.pop(target * self.block_size + offset, None)
            if source * self.block_size + offset in slots:
                slots[target * self.block_size + offset] = slots[source * self.block_size + offset]

    def _write(self, row: StepRow) -> None:
        text = self._text(row)
        entries = [self._entry(text, position) for position in range(row.start, row.end)]
        for slots, places in zip(self._slots, self._slots_of(row), strict=True):
            slots |= zip(places, entries, strict=True)

    def _slots_of(self, row: StepRow) -> list[list[int]]:
        tables = self.states[row.sequence_id].block_tables
        return [slots_of(table, row.start, row.end, self.block_size) for table in tables]

    def _entry(self, text: list[int], position: int) -> tuple[int, int, int]:
        has_windows = any(window is not None for window in self._windows)
        return position, text[position], hash(tuple(text[: position + 1])) if has_windows else 0

    def _check_windows(self, row: StepRow) -> None:
        text, tables = self._text(row), self.states[row.sequence_id].block_tables
        for slots, table, window in zip(self._slots, tables, self._windows, strict=True):
            if window is None:
                continue
            first = max(0, row.start + 1 - window)
            assert min(table[first // self.block_size :]) >= 0, "a block that a window sees is gone"
            for position, slot in enumerate(slots_of(table, first, row.end, self.block_size), start=first):
                assert slots.get(slot) == self._entry(text, position), "not what the window should see"

    def _read(self, state: FakeState, num_tokens: int) -> list[int]:
        prefix = []
        table = state.block_tables[0]
        for position, slot in enumerate(slots_of(table, 0, num_tokens, self.block_size)):
            entry = self._slots[0].get(slot)
            assert entry is not None, "read before it was written"
            assert entry[0] == position, "another sequence's block"
            prefix.append(entry[1])
        return prefix
