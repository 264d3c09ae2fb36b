"""Masks the tokens with which a row's text would leave its grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        masks = self.masks(list(rows.values()))
        apply_bitmask(logits, list(rows), torch.from_numpy(masks))

    def masks(self, rows: Sequence[RowState]) -> Mask:
        """Return the bitmasks of the tokens that rows with grammars allow, `[len(rows), num_mask_words]`."""
        masks = np.zeros((len(rows), num_mask_words(self._vocab_size)), dtype=np.int32)
        states = [cast(GrammarState, row.states[self]) for row in rows]
        usable = [(place, each.matcher) for place, each in enumerate(states) if each.matcher is not None]
        if not usable:
            return masks
        assert self._grammars is not None
        if self._filler is None:
            self._filler = self._grammars.mask_filler()
        filled = self._filler.fill([matcher for _, matcher in usable])
        width = min(filled.shape[1], masks.shape[1])
        masks[[place for place, _ in usable], :width] = filled[:, :width]
        if any(matcher.has_worn_out for _, matcher in usable):
            self._forget(rows)
        for mask, row in zip(masks, rows, strict=True):
            self._hold_back_ends(mask, row)
        return masks

    def error_of(self, row: RowState) -> str:
        """Why a row's grammar allows no token; empty if it does, or there is none."""
        state = row.states.get(self)
        return cast(GrammarState, state).error if state is not None else ""

    def _forget(self, rows: Sequence[RowState]) -> None:
        """Let later texts start from newly compiled grammars where these rows have worn theirs out."""
        assert self._grammars is not None
        for row in rows:
            matcher = cast(GrammarState, row.states[self]).matcher
            if matcher is not None and matcher.has_worn_out and row.params.grammar is not None:
                self._grammars.forget(row.params.grammar)

    def _hold_back_ends(self, mask: Mask, row: RowState) -> None:
        """Exclude ids that may not end the text yet, unless the grammar allows nothing else."""
        params = row.params
        assert self._grammars is not None
        held = [each for each in self._grammars.end_token_ids if each not in params.stop_token_ids]
        if row.num_output_tokens < params.min_tokens:
            held += params.stop_token_ids
        if not held:
            return
        kept = mask.copy()
        words = kept.view(np.uint32)
        for token_id in held:
            if token_id < self._vocab_size:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if kept.any():
            mask[:] = kept
