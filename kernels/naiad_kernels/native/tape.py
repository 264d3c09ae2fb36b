"""A recorded forward pass with the memory that it needs, ready to run."""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from naiad_kernels.array_check import CPU, check_array
from naiad_kernels.best_tokens import BestTokens
from naiad_kernels.draw_tokens import Draws
from naiad_kernels.native.library import Buffer, Kind, Record, Step, StepDraws, Tables, Team
from naiad_kernels.native.panels import padded
from naiad_kernels.native.recorder import Recording, read_values
from naiad_kernels.native.tables import NativeTables


class Tape:
    """Runs a recording for any number of tokens; used by one thread.

    Attributes:
        width: of a row of the result.
    """

    def __init__(self, recording: Recording, team: Team) -> None:
        """Give the recording's values their places in memory.

        Args:
            recording: its tensors are kept.
            team: runs it.
        """
        self._recording = recording
        self._team = team
        places, self._strides = _places(recording)
        self._records = (Record * len(recording.records))()
        for index, record in enumerate(recording.records):
            self._records[index] = record
            placed = self._records[index]
            placed.out = places[record.out]
            read = read_values(record)
            if read:
                placed.in_ = places[read[0]]
            if len(read) == 2:
                placed.other = places[read[1]]
        self._inputs = [places[value] for value in recording.inputs]
        self._input_widths = [recording.widths[value] for value in recording.inputs]
        self._output = places[recording.output]
        self.width = recording.widths[recording.output]
        self._memory: list[torch.Tensor] = []
        self._buffers = (Buffer * len(self._strides))()
        self._nanoseconds: ctypes.Array[ctypes.c_int64] | None = None
        self._kinds = {record.kind for record in recording.records}
        in_groups = (Kind.ATTENTION, Kind.ROTARY_STORE)
        groups = [record.group for record in recording.records if record.kind in in_groups]
        self._num_groups = max(groups, default=-1) + 1
        self._has_positions = not self._kinds.isdisjoint((Kind.ANGLES, *in_groups))
        self._capacity = 0
        self._result = torch.empty(0)
        # Of as many sequences of one token, at position 0, as there is room for.
        self._lone_starts, self._lone_positions = array("i"), array("q")

    def run(
        self,
        num_tokens: int,
        token_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        tables: Sequence[NativeTables] = (),
        inputs: Sequence[torch.Tensor] = (),
        best: BestTokens | None = None,
        allowed: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> torch.Tensor:
        """Compute a step.

        Args:
            num_tokens: of the step, ≥ 1.
            token_ids: `[num_tokens]` int64, if the recording embeds them.
            positions: `[num_tokens]` int64, if it has attention.
            tables: of each group of layers, if it has attention.
            inputs: `[num_tokens, width]` float32 for each of the recording's inputs.
            best: room for the best tokens, if the recording finds them and they are wanted.
            allowed: the bitmask of `best_tokens`, contiguous, for `best` and `draws`; None: all tokens are.
            draws: how each row draws, and room for the tokens, if the recording draws and they are wanted;
                with `best`.

        Returns:
            `[num_tokens, width]` float32, valid until the next call.

        Raises:
            ValueError: something of the step is missing or has another dtype or shape, or the step names a
                token, a position or a block that does not exist.
            MemoryError: there is no memory for the step.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; allowed: 1 or more")
        self._check_inputs(inputs, num_tokens)
        step = Step(num_tokens=num_tokens)
        self._reserve(num_tokens)
        self._name_tokens(step, token_ids, positions)
        self._name_sequences(step, tables)
        if best is not None:
            self._ask_for_best(step, best, allowed)
        elif allowed is not None or draws is not None:
            raise ValueError(
                f"{'draws' if allowed is None else 'allowed'} is given without best; allowed: None"
            )
        if draws is not None:
            self._ask_for_draws(step, draws)
        for place, rows in zip(self._inputs, inputs, strict=True):
            self._take_input(place, rows)
        self._team.library.run(self._team, self._records, self._buffers, step, self._nanoseconds)
        if self._output in self._inputs:
            return inputs[self._inputs.index(self._output)]
        if self._result.shape[0] != num_tokens:
            self._result = self._memory[self._output][:num_tokens, : self.width]
        return self._result

    @contextmanager
    def profiled(self) -> Iterator[Counter[Kind]]:
        """Count the nanoseconds that records of each kind take meanwhile; filled at the end."""
        found: Counter[Kind] = Counter()
        self._nanoseconds = (ctypes.c_int64 * len(self._records))()
        try:
            yield found
        finally:
            for record, nanoseconds in zip(self._records, self._nanoseconds, strict=True):
                found[Kind(record.kind)] += nanoseconds
            self._nanoseconds = None

    def _reserve(self, num_tokens: int) -> None:
        """Have room for a step. What pads a row is zero, and stays so."""
        if self._capacity >= num_tokens:
            return
        # The old memory goes first. If there is none for this step, the next one asks anew.
        self._capacity = 0
        self._memory, self._result = [], torch.empty(0)
        capacity = padded(num_tokens)
        for place, stride in enumerate(self._strides):
            # An input has memory of its own once it needs padding.
            self._memory.append(_zeros(0 if place in self._inputs else capacity, stride))
            self._buffers[place] = Buffer(self._memory[place].data_ptr(), stride)
        self._lone_starts = array("i", range(capacity + 1))
        self._lone_positions = array("q", bytes(8 * capacity))
        self._capacity = capacity

    def _check_inputs(self, inputs: Sequence[torch.Tensor], num_tokens: int) -> None:
        if len(inputs) != len(self._inputs):
            raise ValueError(f"inputs are {len(inputs)} tensors; allowed: {len(self._inputs)}")
        for index, (rows, width) in enumerate(zip(inputs, self._input_widths, strict=True)):
            if rows.shape != (num_tokens, width) or rows.dtype != torch.float32 or rows.device != CPU:
                found = f"{rows.dtype} {tuple(rows.shape)} on {rows.device}"
                raise ValueError(
                    f"inputs[{index}] are {found}, not {torch.float32} {(num_tokens, width)} on {CPU}"
                )

    def _take_input(self, place: int, rows: torch.Tensor) -> None:
        """Let records read an input where it is if it needs no padding, or copy it."""
        if rows.shape[1] != self._strides[place] or not rows.is_contiguous():
            if not len(self._memory[place]):
                self._memory[place] = _zeros(self._capacity, self._strides[place])
            memory = self._memory[place][: len(rows)]
            memory[:, : rows.shape[1]] = rows
            rows = memory
        self._buffers[place].data = rows.data_ptr()

    def _name_tokens(
        self, step: Step, token_ids: torch.Tensor | None, positions: torch.Tensor | None
    ) -> None:
        missing = "token_ids" if token_ids is None and Kind.EMBED in self._kinds else ""
        if positions is None and self._has_positions:
            missing = missing or "positions"
        if missing:
            raise ValueError(f"{missing} is None; allowed: one for each of the {step.num_tokens} tokens")
        if token_ids is not None:
            step.token_ids = _int64("token_ids", token_ids, step.num_tokens)
        if positions is None:
            step.positions = self._lone_positions.buffer_info()[0]
        else:
            step.positions = _int64("positions", positions, step.num_tokens)

    def _name_sequences(self, step: Step, tables: Sequence[NativeTables]) -> None:
        """Rows that have no sequence are sequences of their own, at position 0."""
        if len(tables) < self._num_groups:
            raise ValueError(f"tables are of {len(tables)} groups; allowed: {self._num_groups} or more")
        for group, each in enumerate(tables):
            each.check(group, tables[0], step.num_tokens)
        starts = tables[0].query_starts if tables else self._lone_starts
        step.num_seqs = len(starts) - 1 if tables else step.num_tokens
        step.query_starts = starts.buffer_info()[0]
        step.tables = (Tables * len(tables))(
            *(Tables(each.blocks.buffer_info()[0], each.stride) for each in tables)
        )
        step.num_groups = len(tables)

    def _ask_for_best(self, step: Step, best: BestTokens, allowed: torch.Tensor | None) -> None:
        if Kind.BEST_TOKENS not in self._kinds:
            raise ValueError("best is given; allowed: None, as the recording finds no best tokens")
        num_rows = step.num_tokens
        step.best_ids = _int64("best.token_ids", best.token_ids, num_rows)
        step.best_logits = _pointer("best.logits", best.logits, torch.float32, (num_rows,))
        if allowed is not None:
            num_words = allowed.shape[1] if allowed.dim() == 2 else 1
            step.allowed = _pointer("allowed", allowed, torch.int32, (num_rows, num_words))
            step.allowed_stride = num_words

    def _ask_for_draws(self, step: Step, draws: Draws) -> None:
        if Kind.DRAW_TOKENS not in self._kinds:
            raise ValueError("draws is given; allowed: None, as the recording draws no tokens")
        filters, num_rows = draws.filters, step.num_tokens
        step.draws = ctypes.pointer(
            StepDraws(
                temperatures=_float64("draws.filters.temperature", filters.temperature, num_rows),
                top_k=_int64("draws.filters.top_k", filters.top_k, num_rows),
                top_p=_float64("draws.filters.top_p", filters.top_p, num_rows),
                log_min_p=_float64("draws.filters.log_min_p", filters.log_min_p, num_rows),
                keys=_int64("draws.keys", draws.keys, num_rows),
                token_ids=_int64("draws.token_ids", draws.token_ids, num_rows),
            )
        )


def _places(recording: Recording) -> tuple[list[int], list[int]]:
    """A buffer for each value; values share one if they are as wide and are not needed at the same time.

    Returns:
        The buffer of each value, and the stride of each buffer.
    """
    last_read = dict.fromkeys(recording.inputs, 0)
    for index, record in enumerate(recording.records):
        for value in read_values(record):
            last_read[value] = index
    last_read[recording.output] = len(recording.records)
    places = [-1] * len(recording.widths)
    strides: list[int] = []
    free: dict[int, list[int]] = {}

    def take(value: int) -> None:
        width = recording.widths[value]
        if free.get(width):
            places[value] = free[width].pop()
        else:
            places[value] = len(strides)
            strides.append(padded(width))

    for value in recording.inputs:
        take(value)
    for index, record in enumerate(recording.records):
        if places[record.out] == -1:
            take(record.out)
        for value in {*read_values(record), record.out}:
            if last_read.get(value, index) == index and value not in recording.inputs:
                free.setdefault(recording.widths[value], []).append(places[value])
    return places, strides


def _zeros(num_rows: int, width: int) -> torch.Tensor:
    try:
        return torch.zeros(num_rows, width)
    except RuntimeError as error:
        raise MemoryError(f"there is no memory for {num_rows} rows of the native kernels") from error


def _int64(name: str, tensor: torch.Tensor, num_tokens: int) -> int:
    return _pointer(name, tensor, torch.int64, (num_tokens,))


def _float64(name: str, tensor: torch.Tensor, num_tokens: int) -> int:
    return _pointer(name, tensor, torch.float64, (num_tokens,))


def _pointer(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    check_array(name, tensor, dtype, shape)
    return tensor.data_ptr()
