"""Masks the tokens with which a row's text would leave its grammar."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import cast
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from naiad.errors import InvalidRequestError
from naiad.grammar import CompiledGrammar, GrammarMatcher, Grammars, MaskFiller
from naiad.grammar.matcher import Mask
from naiad.sampling.draw import is_drawn, is_filtered
from naiad.sampling.row_state import RowState
from naiad.sequence import SamplingParams
from naiad_kernels.apply_bitmask import apply_bitmask
from naiad_kernels.best_tokens import num_mask_words

# A word of a mask.
_EVERY_TOKEN = -1
# So many misses in a row are counted: up to 15 tokens get their masks first.
_MOST_MISSES = 5


class GrammarState:
    """Where the output of a row, or a view of its drafts, stands in the row's grammar.

    Attributes:
        matcher: None: the grammar cannot be compiled here.
        error: why the row cannot go on; empty: it can.
    """

    __slots__ = ("_grammar", "_num_masked", "_num_misses", "error_of_compiling", "matcher")

    def __init__(
        self,
        grammar: CompiledGrammar | None,
        matcher: GrammarMatcher | None,
        error_of_compiling: str = "",
    ) -> None:
        """Start with a matcher of the grammar that nobody else uses."""
        # The sequence holds it; the state may outlive the sequence.
        self._grammar = None if grammar is None else ref(grammar)
        self.matcher = matcher
        self.error_of_compiling = error_of_compiling
        self._num_misses = self._num_masked = 0

    @property
    def grammar(self) -> CompiledGrammar | None:
        """What the matcher follows; None: it cannot be compiled here, or nobody holds it any more."""
        return None if self._grammar is None else self._grammar()

    @property
    def error(self) -> str:
        """Why no token is possible; empty if one may be."""
        return self.error_of_compiling if self.matcher is None else self.matcher.error

    def advance(self, token_ids: Sequence[int], is_prompt: bool) -> None:
        """Take in output tokens, as `TokenState` requires."""
        if not is_prompt and self.matcher is not None:
            self.matcher.advance(token_ids)

    def clone(self) -> GrammarState:
        """Return an equal state that advances on its own."""
        matcher = None if self.matcher is None else self.matcher.clone()
        clone = GrammarState(self.grammar, matcher, self.error_of_compiling)
        clone._num_misses, clone._num_masked = self._num_misses, self._num_masked
        return clone

    def takes_mask_first(self) -> bool:
        """Whether the next token is not worth, or not possible, to be picked without a mask."""
        if self._num_masked > 0:
            self._num_masked -= 1
            return True
        return self.matcher is None or bool(self.matcher.error) or self.matcher.is_due

    def note_try(self, hit: bool) -> None:
        """Record whether a token that was picked without a mask is allowed.

        After the second miss in a row, and each further one, the mask comes first for a while.
        """
        self._num_misses = 0 if hit else min(self._num_misses + 1, _MOST_MISSES)
        self._num_masked = 0 if hit else (1 << self._num_misses - 1) - 1


class GrammarMask:
    """The logits processor of grammars."""

    def __init__(self, grammars: Grammars | None, vocab_size: int) -> None:
        """Set up.

        Args:
            grammars: has the rows' grammars, which their sequences hold; None: rows with grammars fail.
            vocab_size: number of columns of the logits.
        """
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._filler: MaskFiller | None = None
        self._masks: Mask = np.empty((0, 0), dtype=np.int32)

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there is a grammar."""
        return params.grammar is not None

    def new_state(self, params: SamplingParams) -> GrammarState:
        """Start at the beginning of a text."""
        assert params.grammar is not None
        if self._grammars is None:
            return GrammarState(None, None, "this model runner has no tokenizer")
        try:
            grammar = self._grammars.held(params.grammar)
        except InvalidRequestError as error:
            return GrammarState(None, None, str(error))
        return GrammarState(grammar, grammar.matcher())

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        allowed = self.allowed(list(rows.values()))
        assert allowed is not None
        apply_bitmask(logits, list(rows), allowed)

    def allowed(self, rows: Sequence[RowState], places: Collection[int] | None = None) -> Tensor | None:
        """Return the bitmask of the tokens that each row may get; None: every row may get every token.

        It is `[len(rows), num_words]` int32, valid until the next call, and may have words for ids that the
        model lacks. A row without a grammar may get every token.

        Args:
            rows: the state of each row.
            places: rows whose masks are filled; None: all. Other rows may get every token.
        """
        states = self._states_of(rows)
        wanted = range(len(rows)) if places is None else places
        if all(states[place] is None for place in wanted):
            return None
        masks = self._room_for(len(rows))
        masks[:] = _EVERY_TOKEN
        matchers: dict[int, GrammarMatcher] = {}
        for place in wanted:
            state = states[place]
            if state is not None and state.matcher is not None:
                matchers[place] = state.matcher
            elif state is not None:
                masks[place] = 0
        if matchers:
            self._fill(masks, matchers, rows)
        return torch.from_numpy(masks)

    def masked_first(self, rows: Sequence[RowState]) -> set[int]:
        """Return the places of rows that need their masks before a token is picked; call it once a step.

        Which tokens top-k, top-p and min-p keep depends on which are allowed. Of other rows `unsure` can tell
        afterwards.
        """
        return {
            place
            for place, (row, state) in enumerate(zip(rows, self._states_of(rows), strict=True))
            if state is not None and (self._filler is None or _is_filtered(row) or state.takes_mask_first())
        }

    def unsure(
        self, rows: Sequence[RowState], masked: Collection[int], token_ids: Tensor, best: Tensor
    ) -> list[int]:
        """Return the places of rows that have to be picked again, with their masks.

        The token that wins among all also wins among those that are allowed if it is one of them.

        Args:
            rows: the state of each row.
            masked: those of `masked_first`.
            token_ids: `[len(rows)]` int64, picked with the masks of these rows.
            best: `[len(rows)]` float32, each row's greatest logit. If it is not finite, it may be that of a
                token that is not allowed.
        """
        found = zip(rows, self._states_of(rows), token_ids.tolist(), best.tolist(), strict=True)
        places = []
        for place, (row, state, token_id, logit) in enumerate(found):
            if state is not None and place not in masked:
                is_sure = math.isfinite(logit) and self._surely_allows(row, state, token_id)
                state.note_try(is_sure)
                if not is_sure:
                    places.append(place)
        return places

    def _surely_allows(self, row: RowState, state: GrammarState, token_id: int) -> bool:
        assert self._filler is not None
        assert state.matcher is not None
        # `_hold_back_ends` decides about these.
        is_end = token_id in row.params.stop_token_ids or token_id in self._filler.end_token_ids
        return not is_end and state.matcher.surely_allows(token_id)

    def _states_of(self, rows: Sequence[RowState]) -> list[GrammarState | None]:
        return [cast("GrammarState | None", row.states.get(self)) for row in rows]

    def _room_for(self, num_masks: int) -> Mask:
        """Return masks with any content; new memory for each step would cost more than some of the masks."""
        if len(self._masks) < num_masks:
            self._masks = np.empty((num_masks, self._num_words()), dtype=np.int32)
        return self._masks[:num_masks]

    def _num_words(self) -> int:
        if self._filler is None and self._grammars is not None:
            # Without a tokenizer no row has a matcher.
            with suppress(InvalidRequestError):
                self._filler = self._grammars.mask_filler()
        return num_mask_words(self._vocab_size) if self._filler is None else self._filler.num_words

    def _fill(self, masks: Mask, matchers: Mapping[int, GrammarMatcher], rows: Sequence[RowState]) -> None:
        assert self._filler is not None
        self._filler.fill(masks, matchers)
        for place, matcher in matchers.items():
            if matcher.has_worn_out:
                self._forget(rows[place])
            self._hold_back_ends(masks[place], rows[place])

    def error_of(self, row: RowState) -> str:
        """Why a row's grammar allows no token; empty if it does, or there is none."""
        state = row.states.get(self)
        return cast(GrammarState, state).error if state is not None else ""

    def _forget(self, row: RowState) -> None:
        """Let later requests get a newly compiled grammar where this row has worn its own out."""
        grammar = cast(GrammarState, row.states[self]).grammar
        assert self._grammars is not None
        if grammar is not None:
            self._grammars.forget(grammar)

    def _hold_back_ends(self, mask: Mask, row: RowState) -> None:
        """Exclude ids that may not end the text yet, unless the grammar allows nothing else."""
        params = row.params
        assert self._filler is not None
        held = [each for each in self._filler.end_token_ids if each not in params.stop_token_ids]
        if row.num_output_tokens < params.min_tokens:
            held += params.stop_token_ids
        if not held:
            return
        kept = mask[: num_mask_words(self._vocab_size)].copy()
        words = kept.view(np.uint32)
        for token_id in held:
            if 0 <= token_id < self._vocab_size:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if kept.any():
            mask[: len(kept)] = kept


def _is_filtered(row: RowState) -> bool:
    return is_drawn(row.params) and is_filtered(row.params)
