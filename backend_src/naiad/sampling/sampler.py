"""One token for each row of logits, each row by its own parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from naiad.errors import InternalError, NaiadError, NoTokenPossibleError
from naiad.sampling.draw import draw, draw_on_device, is_greedy
from naiad.sampling.filters import TOP_P_RESET
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, apply_processors
from naiad.sampling.row_state import RowState, Stateful, new_row
from naiad.sampling.sampler_output import NOT_FINITE, RawLogits, SamplerOutput, add_candidates, normalize
from naiad.sequence import SamplingParams
from naiad_kernels.readback import Readback


@dataclass(slots=True, frozen=True)
class QueuedSample:
    """A pass that the device has been told to do.

    Attributes:
        rows: the state of each row.
        token_ids: [num_rows] int64 on the device; of a row that fails, any.
        best: [num_rows] float32, each row's greatest logit.
        logits: [num_rows, vocab_size] float32, processed; kept only for beams.
        raw: what rows ask for beside a token.
        beams: indices of the rows that are beams.
        readback: of `token_ids`, and of which rows can be used.
    """

    rows: Sequence[RowState]
    token_ids: Tensor
    best: Tensor
    logits: Tensor | None
    raw: RawLogits | None
    beams: list[int]
    readback: Readback


class Sampler:
    """Samples all rows of a step in one pass.

    A row's logits go through the processors that apply to it, then temperature, top-k, top-p and
    min-p, then one token is drawn. Its result depends on the row alone: not on its batch mates,
    not on its place among them. A row pays for nothing that it does not ask for.
    """

    def __init__(self, vocab_size: int, processors: Iterable[LogitsProcessor] = LOGITS_PROCESSORS) -> None:
        """Sample ids in [0, vocab_size).

        Args:
            vocab_size: columns of the logits.
            processors: in the order in which they are applied.
        """
        self._vocab_size = vocab_size
        self._processors = tuple(processors)

    def new_row(self, sequence_id: int, params: SamplingParams, num_prompt_tokens: int) -> RowState:
        """The state of a sequence without known tokens."""
        features: tuple[Stateful, ...] = (*self._processors, TOP_P_RESET)
        return new_row(features, sequence_id, params, num_prompt_tokens)

    def reads_tokens(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters can be sampled only when all its ids are known."""
        return bool(self.new_row(0, params, 0).states)

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> SamplerOutput:
        """`finish` what is to `start`, if there are any rows."""
        return self.finish(self.start(logits, rows)) if rows else SamplerOutput()

    def start(self, logits: Tensor, rows: Sequence[RowState]) -> QueuedSample:
        """Begin to sample the token that follows each row's known tokens.

        Args:
            logits: [num_rows, vocab_size] float32; overwritten.
            rows: the state of each row, each with an id of its own; at least one.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        assert logits.dtype == torch.float32
        raw = RawLogits.of(logits, rows)
        beams = [index for index, row in enumerate(rows) if row.params.num_candidates]
        normalize(logits, beams)
        apply_processors(self._processors, logits, rows)
        token_ids = _first_best(logits)
        best = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        # The maximum is NaN, +inf or -inf exactly if the row can not be used.
        is_usable = best.isfinite()
        _draw(logits, best, is_usable, rows, token_ids)
        kept = logits if beams else None
        return QueuedSample(rows, token_ids, best, kept, raw, beams, Readback([token_ids, is_usable]))

    def finish(self, queued: QueuedSample) -> SamplerOutput:
        """Wait for the tokens.

        Returns:
            An id for each row and what it asks for beside it, or an error for rows with NaN or
            +inf in their logits, or with no possible token at all. A beam without one has no
            candidates: its search may go on.
        """
        token_ids, usable = (each.tolist() for each in queued.readback.wait())
        output = self._output(queued.rows, queued.best, usable, token_ids)
        if queued.raw is not None:
            queued.raw.add_to(output)
        if queued.logits is not None:
            add_candidates(queued.logits, queued.rows, queued.beams, output)
        return output

    def _output(
        self, rows: Sequence[RowState], best: Tensor, usable: list[bool], token_ids: list[int]
    ) -> SamplerOutput:
        output = SamplerOutput()
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            if not usable[index] and row.params.num_candidates and float(best[index]) == -math.inf:
                output.candidates[row.sequence_id] = []
            elif not usable[index]:
                output.errors[row.sequence_id] = self._why_unusable(row, float(best[index]))
            elif not 0 <= token_id < self._vocab_size:
                output.errors[row.sequence_id] = InternalError("the token drawn is out of range")
            else:
                output.sampled_token_ids[row.sequence_id] = token_id
        return output

    def _why_unusable(self, row: RowState, best: float) -> NaiadError:
        is_changed = any(processor.applies_to(row.params) for processor in self._processors)
        return NoTokenPossibleError() if best == -math.inf and is_changed else InternalError(NOT_FINITE)


def _is_drawn(params: SamplingParams) -> bool:
    return not params.num_candidates and not is_greedy(params)


def _draw(
    logits: Tensor, best: Tensor, is_usable: Tensor, rows: Sequence[RowState], token_ids: Tensor
) -> None:
    """Overwrite the best token's id where one is drawn."""
    drawn = [index for index, row in enumerate(rows) if _is_drawn(row.params)]
    if drawn and logits.device.type == "cuda":
        # For rows that can not be used too: a GPU that waits for the host does nothing.
        draw_on_device(logits, best, rows, drawn, token_ids)
    elif drawn:
        usable = is_usable.tolist()
        drawn = [index for index in drawn if usable[index]]
        if drawn:
            draw(logits, best, rows, drawn, token_ids)


def _first_best(logits: Tensor) -> Tensor:
    """The lowest id among each row's greatest logits, or of its first NaN: [num_rows] int64."""
    if logits.device.type == "cpu":
        # NumPy's is vectorized, torch's is not: a tenth of the time.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)
