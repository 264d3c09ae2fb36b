"""Masks the tokens with which a row's text would leave its grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

import numpy as np
import torch
from torch import Tensor

from naiad.errors import InvalidRequestError
from naiad.grammar import GrammarMatcher, Grammars, MaskFiller
from naiad.grammar.matcher import Mask
from naiad.sampling.row_state import RowState
from naiad.sequence import SamplingParams
from naiad_kernels.apply_bitmask import apply_bitmask
from naiad_kernels.best_tokens import num_mask_words


class GrammarState:
    """Where the output of a row, or a view of its drafts, stands in the row's grammar.

    Attributes:
        matcher: None: the grammar cannot be compiled here.
        error: why the row cannot go on; empty: it can.
    """

    __slots__ = ("error_of_compiling", "matcher")

    def __init__(self, matcher: GrammarMatcher | None, error_of_compiling: str = "") -> None:
        """Start with a matcher that nobody else uses."""
        self.matcher = matcher
        self.error_of_compiling = error_of_compiling

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
        return GrammarState(matcher, self.error_of_compiling)


class GrammarMask:
    """The logits processor of grammars."""

    def __init__(self, grammars: Grammars | None, vocab_size: int) -> None:
        """Set up.

        Args:
            grammars: compiles the rows' grammars; None: rows with grammars fail.
            vocab_size: number of columns of the logits.
        """
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._filler: MaskFiller | None = None

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether there is a grammar."""
        return params.grammar is not None

    def new_state(self, params: SamplingParams) -> GrammarState:
        """Start at the beginning of a text."""
        assert params.grammar is not None
        if self._grammars is None:
            return GrammarState(None, "this model runner has no tokenizer")
        try:
            return GrammarState(self._grammars.get(params.grammar).matcher())
        except InvalidRequestError as error:
            return GrammarState(None, str(error))

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        allowed = self.allowed(list(rows.values()))
        assert allowed is not None
        apply_bitmask(logits, list(rows), allowed)

    def allowed(self, rows: Sequence[RowState]) -> Tensor | None:
        """Return the bitmask of the tokens that each row may get; None: no row has a grammar.

        It is `[len(rows), num_words]` int32, and may have words for ids that the model lacks. A row without a
        grammar may get every token.
        """
        bound = {place: row for place, row in enumerate(rows) if self in row.states}
        if not bound:
            return None
        masks = self._empty_masks(len(rows))
        if len(bound) < len(rows):
            masks[[place for place in range(len(rows)) if place not in bound]] = -1
        self._fill(masks, bound)
        return torch.from_numpy(masks)

    def _empty_masks(self, num_masks: int) -> Mask:
        if self._filler is None and self._grammars is not None:
            # Without a tokenizer no row has a matcher.
            with suppress(InvalidRequestError):
                self._filler = self._grammars.mask_filler()
        if self._filler is None:
            return np.zeros((num_masks, num_mask_words(self._vocab_size)), dtype=np.int32)
        return self._filler.empty_masks(num_masks)

    def _fill(self, masks: Mask, rows: Mapping[int, RowState]) -> None:
        """Fill the masks of rows with grammars, which are empty now; they stay so if a row cannot go on."""
        states = {place: cast(GrammarState, row.states[self]) for place, row in rows.items()}
        usable = {place: each.matcher for place, each in states.items() if each.matcher is not None}
        if not usable:
            return
        assert self._filler is not None
        self._filler.fill(masks, usable)
        for place, matcher in usable.items():
            if matcher.has_worn_out:
                self._forget(rows[place])
            self._hold_back_ends(masks[place], rows[place])

    def error_of(self, row: RowState) -> str:
        """Why a row's grammar allows no token; empty if it does, or there is none."""
        state = row.states.get(self)
        return cast(GrammarState, state).error if state is not None else ""

    def _forget(self, row: RowState) -> None:
        """Let later texts start from a newly compiled grammar where this row has worn its own out."""
        assert self._grammars is not None
        assert row.params.grammar is not None
        self._grammars.forget(row.params.grammar)

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
            if token_id < self._vocab_size:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if kept.any():
            mask[: len(kept)] = kept
