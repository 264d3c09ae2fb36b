"""A recorded forward pass with the memory that it needs, ready to run."""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

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
        self._output = places[recording.output]
        self.width = recording.widths[recording.output]
        self._memory: list[torch.Tensor] = []
        self._buffers = (Buffer * len(self._strides))()
        self._nanoseconds: ctypes.Array[ctypes.c_int64] | None = None
        self._kinds = {record.kind for record in recording.records}
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
            ValueError: the step names a token, a position or a block that does not exist.
            MemoryError: there is no memory for the step.
        """
        self._reserve(num_tokens)
        for place, rows in zip(self._inputs, inputs, strict=True):
            self._take_input(place, rows)
        step = Step(num_tokens=num_tokens)
        # Rows that have no sequence are sequences of their own, at position 0.
        starts = tables[0].query_starts if tables else self._lone_starts
        step.num_seqs = len(starts) - 1 if tables else num_tokens
        step.query_starts = starts.buffer_info()[0]
        if positions is None:
            step.positions = self._lone_positions.buffer_info()[0]
        else:
            step.positions = _int64(positions, num_tokens)
        step.token_ids = None if token_ids is None else _int64(token_ids, num_tokens)
        groups = (Tables * len(tables))(
            *(Tables(each.blocks.buffer_info()[0], each.stride) for each in tables)
        )
        step.tables = groups
        step.num_groups = len(tables)
        if best is not None:
            self._ask_for_best(step, best, allowed)
        if draws is not None:
            self._ask_for_draws(step, draws)
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

    def _take_input(self, place: int, rows: torch.Tensor) -> None:
        """Let records read an input where it is if it needs no padding, or copy it."""
        if rows.shape[1] != self._strides[place] or not rows.is_contiguous() or rows.dtype != torch.float32:
            if not len(self._memory[place]):
                self._memory[place] = _zeros(self._capacity, self._strides[place])
            memory = self._memory[place][: len(rows)]
            memory[:, : rows.shape[1]] = rows
            rows = memory
        self._buffers[place].data = rows.data_ptr()

    def _ask_for_best(self, step: Step, best: BestTokens, allowed: torch.Tensor | None) -> None:
        assert Kind.BEST_TOKENS in self._kinds, "the recording does not find the best tokens"
        assert best.logits.shape == (step.num_tokens,), (best.logits.shape, step.num_tokens)
        step.best_ids = _int64(best.token_ids, step.num_tokens)
        step.best_logits = best.logits.data_ptr()
        if allowed is not None:
            assert allowed.dtype == torch.int32, allowed.dtype
            assert len(allowed) == step.num_tokens, allowed.shape
            assert allowed.is_contiguous(), allowed.stride()
            step.allowed = allowed.data_ptr()
            step.allowed_stride = allowed.shape[1]

    def _ask_for_draws(self, step: Step, draws: Draws) -> None:
        assert Kind.DRAW_TOKENS in self._kinds, "the recording draws no tokens"
        assert step.best_ids, "a draw starts from the best tokens"
        filters, num_rows = draws.filters, step.num_tokens
        step.draws = ctypes.pointer(
            StepDraws(
                temperatures=_float64(filters.temperature, num_rows),
                top_k=_int64(filters.top_k, num_rows),
                top_p=_float64(filters.top_p, num_rows),
                log_min_p=_float64(filters.log_min_p, num_rows),
                keys=_int64(draws.keys, num_rows),
                token_ids=_int64(draws.token_ids, num_rows),
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


def _int64(tensor: torch.Tensor, num_tokens: int) -> int:
    return _pointer(tensor, torch.int64, num_tokens)


def _float64(tensor: torch.Tensor, num_tokens: int) -> int:
    return _pointer(tensor, torch.float64, num_tokens)


def _pointer(tensor: torch.Tensor, dtype: torch.dtype, num_tokens: int) -> int:
    assert tensor.dtype == dtype, tensor.dtype
    assert tensor.shape == (num_tokens,), (tensor.shape, num_tokens)
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
