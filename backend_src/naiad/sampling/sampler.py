"""Samples one token for each row of logits, each row with its own parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from naiad.errors import InternalError, InvalidRequestError, NaiadError, NoTokenPossibleError
from naiad.grammar import Grammars
from naiad.sampling.draw import draw, draw_on_device, draws_of, is_drawn
from naiad.sampling.filters import TOP_P_RESET
from naiad.sampling.grammar_mask import GrammarMask
from naiad.sampling.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, apply_processors
from naiad.sampling.row_state import RowState, Stateful, new_row
from naiad.sampling.sampler_output import NOT_FINITE, RawLogits, SamplerOutput, add_candidates, normalize
from naiad.sequence import SamplingParams
from naiad_kernels.best_tokens import BestTokens, best_tokens
from naiad_kernels.draw_tokens import Draws
from naiad_kernels.readback import Readback

# Finds the best tokens of rows of logits, and draws where a row draws; a bitmask says which are allowed.
Pick = Callable[[Tensor, Draws | None, Tensor | None], BestTokens]
# Computes logits, and does the same with them.
Compute = Callable[[Draws | None, Tensor | None], tuple[Tensor, BestTokens]]


@dataclass(slots=True, frozen=True)
class Picked:
    """What a kernel has found in rows of logits.

    Attributes:
        best: the best token of each row.
        draws: the tokens drawn; None: rows that draw still have to.
    """

    best: BestTokens
    draws: Draws | None

    @property
    def token_ids(self) -> Tensor:
        """`[num_rows]` int64: each row's token; the best one where the row still has to draw."""
        return self.best.token_ids if self.draws is None else self.draws.token_ids


@dataclass(slots=True, frozen=True)
class QueuedSample:
    """A sampling pass that is queued on the device.

    Attributes:
        rows: the state of each row.
        token_ids: [num_rows] int64 on the device; arbitrary for rows that fail.
        logits: [num_rows, vocab_size] float32, processed; kept only for beams.
        raw: unprocessed logits of rows that asked for logits or log-probabilities.
        beams: indices of the rows that are beams.
        readback: copies `token_ids` to the host, and each row's greatest logit, which is NaN, +inf or -inf
            exactly if the row is unusable.
    """

    rows: Sequence[RowState]
    token_ids: Tensor
    logits: Tensor | None
    raw: RawLogits | None
    beams: list[int]
    readback: Readback

    def greatest_logits(self) -> list[float]:
        """Wait for the greatest logit of each row."""
        greatest: list[float] = self.readback.wait()[1].tolist()
        return greatest


class Sampler:
    """Samples all rows of a step in one pass.

    A row's logits go through the processors that apply to it, then temperature, top-k, top-p and
    min-p, then one token is drawn. The result depends on the row alone, not on the other rows of the
    batch or its place among them. Features that a row does not use cost it nothing.
    """

    def __init__(
        self,
        vocab_size: int,
        processors: Iterable[LogitsProcessor] = LOGITS_PROCESSORS,
        pick: Pick | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Sample ids in [0, vocab_size).

        Args:
            vocab_size: number of columns of the logits.
            processors: in the order in which they are applied.
            pick: finds best tokens and draws on a CPU; None: torch does.
            grammars: compiles the grammars of rows; None: rows with grammars fail.
        """
        self._vocab_size = vocab_size
        self._grammar_mask = GrammarMask(grammars, vocab_size)
        # Before the others, so that those that depend on what is possible know.
        self._processors = (self._grammar_mask, *processors)
        self._pick = pick

    def new_row(self, sequence_id: int, params: SamplingParams, num_prompt_tokens: int) -> RowState:
        """Return the state of a sequence without known tokens."""
        features: tuple[Stateful, ...] = (*self._processors, TOP_P_RESET)
        return new_row(features, sequence_id, params, num_prompt_tokens, self._grammar_mask)

    def reads_tokens(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters can be sampled only once all its ids are on the host."""
        return bool(self.new_row(0, params, 0).states)

    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> SamplerOutput:
        """`start` and `finish` in one call; the output is empty if there are no rows."""
        return self.finish(self.start(logits, rows)) if rows else SamplerOutput()

    def takes_best(self, rows: Iterable[RowState]) -> bool:
        """Whether `pick` can sample these rows."""
        return all(row.is_plain for row in rows)

    def pick(self, rows: Sequence[RowState], compute: Compute) -> QueuedSample:
        """Sample rows for which `takes_best` holds, in the call that computes their logits.

        Args:
            rows: the state of each row, with distinct ids; at least one.
            compute: computes the rows' logits, and picks from them.
        """
        draws = draws_of(rows, self._vocab_size)
        if all(row.params.grammar is None for row in rows):
            logits, best = compute(draws, None)
            return self.start(logits, rows, Picked(best, draws))
        masked = self._grammar_mask.masked_first(rows)
        logits, best = compute(draws, self._grammar_mask.allowed(rows, masked))
        picked = Picked(best, draws)
        places = self._grammar_mask.unsure(rows, masked, picked.token_ids, best.logits)
        if places:
            self._pick_again(logits, rows, picked, places)
        return self.start(logits, rows, picked)

    def _pick_again(
        self, logits: Tensor, rows: Sequence[RowState], picked: Picked, places: list[int]
    ) -> None:
        """Pick for some rows among the tokens that their grammars allow."""
        assert self._pick is not None
        some, index = [rows[place] for place in places], torch.tensor(places)
        if len(some) < len(rows):
            logits = logits[index]
        draws = draws_of(some, self._vocab_size)
        best = self._pick(logits, draws, self._grammar_mask.allowed(some))
        picked.best.logits[index] = best.logits
        picked.token_ids[index] = Picked(best, draws).token_ids

    def start(self, logits: Tensor, rows: Sequence[RowState], picked: Picked | None = None) -> QueuedSample:
        """Queue sampling of each row's next token.

        Args:
            logits: [num_rows, vocab_size] float32; overwritten.
            rows: the state of each row, with distinct ids; at least one.
            picked: from these logits, if `takes_best`; overwritten. None: tokens are picked here.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        assert logits.dtype == torch.float32
        raw: RawLogits | None = None
        beams: list[int] = []
        if picked is None:
            raw = RawLogits.of(logits, rows)
            beams = [index for index, row in enumerate(rows) if row.params.num_candidates]
            normalize(logits, beams)
            apply_processors(self._processors, logits, rows)
            picked = self._picked(logits, rows)
        best = picked.best
        _draw(logits, picked, rows)
        kept = logits if beams else None
        readback = Readback([best.token_ids, best.logits])
        return QueuedSample(rows, best.token_ids, kept, raw, beams, readback)

    def finish(self, queued: QueuedSample) -> SamplerOutput:
        """Wait for the tokens.

        Returns:
            For each row an id and what else it asked for, or an error if its logits contain NaN or
            +inf or if no token is possible. A beam without a possible token has no candidates instead
            of an error, because its search may continue.
        """
        token_ids, best = (each.tolist() for each in queued.readback.wait())
        output = self._output(queued.rows, best, token_ids)
        if queued.raw is not None:
            queued.raw.add_to(output)
        if queued.logits is not None:
            add_candidates(queued.logits, queued.rows, queued.beams, output)
        return output

    def _picked(self, logits: Tensor, rows: Sequence[RowState]) -> Picked:
        if self._pick is None:
            return Picked(best_tokens(logits), None)
        draws = draws_of(rows, self._vocab_size)
        return Picked(self._pick(logits, draws, None), draws)

    def _output(self, rows: Sequence[RowState], best: list[float], token_ids: list[int]) -> SamplerOutput:
        output = SamplerOutput()
        for row, token_id, logit in zip(rows, token_ids, best, strict=True):
            is_usable = math.isfinite(logit)
            if not is_usable and row.params.num_candidates and logit == -math.inf:
                output.candidates[row.sequence_id] = []
            elif not is_usable:
                output.errors[row.sequence_id] = self._why_unusable(row, logit)
            elif not 0 <= token_id < self._vocab_size:
                output.errors[row.sequence_id] = InternalError("the token drawn is out of range")
            else:
                output.sampled_token_ids[row.sequence_id] = token_id
        return output

    def _why_unusable(self, row: RowState, best: float) -> NaiadError:
        if error := self._grammar_mask.error_of(row):
            return InvalidRequestError(f"the output cannot follow the grammar any further: {error}")
        is_changed = any(processor.applies_to(row.params) for processor in self._processors)
        return NoTokenPossibleError() if best == -math.inf and is_changed else InternalError(NOT_FINITE)


def _draw(logits: Tensor, picked: Picked, rows: Sequence[RowState]) -> None:
    """Overwrite the best token's id in rows that draw their token."""
    best, token_ids = picked.best.logits, picked.best.token_ids
    if picked.draws is not None:
        token_ids.copy_(picked.draws.token_ids)
        return
    drawn = [index for index, row in enumerate(rows) if is_drawn(row.params)]
    if drawn and logits.device.type == "cuda":
        # Unusable rows are drawn too: finding out which they are would make the GPU wait for the host.
        draw_on_device(logits, best, rows, drawn, token_ids)
    elif drawn:
        greatest = best.tolist()
        drawn = [index for index in drawn if math.isfinite(greatest[index])]
        if drawn:
            draw(logits, best, rows, drawn, token_ids)
