"""Masks the tokens with which a row's text would leave its grammar."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

import numpy as np
import torch
from torch import Tensor

from naiad.errors import InvalidRequestError
from naiad.grammar import GrammarMatcher, Grammars, MaskFiller
from naiad.grammar.matcher import Mask
from naiad.sampling.draw import is_drawn, is_filtered
from naiad.sampling.row_state import RowState
from naiad.sequence import SamplingParams
from naiad_kernels.apply_bitmask import apply_bitmask
from naiad_kernels.best_tokens import num_mask_words

# A word of a mask.
_EVERY_TOKEN = -1


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
        self._masks: Mask = np.empty((0, 0), dtype=np.int32)

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

        It is `[len(rows), num_words]` int32, valid until the next call, and may have words for ids that the
        model lacks. A row without a grammar may get every token.
        """
        return self._masks_of(rows, self._states_of(rows))

    def allowed_where_filtered(self, rows: Sequence[RowState]) -> Tensor | None:
        """Return `allowed`, but with every token for the rows of which `not_allowed` can tell later.

        It cannot where filters apply: which tokens top-p keeps depends on which are allowed.
        """
        states = zip(rows, self._states_of(rows), strict=True)
        return self._masks_of(rows, [state if _is_filtered(row) else None for row, state in states])

    def not_allowed(self, rows: Sequence[RowState], token_ids: Tensor, best: Tensor) -> list[int]:
        """Return the places of rows whose token may not be one that `allowed` allows.

        The token that wins among all also wins among those that are allowed if it is one of them, so that
        most masks need not be filled.

        Args:
            rows: the state of each row.
            token_ids: `[len(rows)]` int64, picked with the mask of `allowed_where_filtered`.
            best: `[len(rows)]` float32, each row's greatest logit. If it is not finite, it may be that of a
                token that is not allowed.
        """
        found = zip(rows, self._states_of(rows), token_ids.tolist(), best.tolist(), strict=True)
        return [
            place
            for place, (row, state, token_id, logit) in enumerate(found)
            if not (state is None or _is_filtered(row))
            and not (math.isfinite(logit) and self._surely_allows(row, state, token_id))
        ]

    def _surely_allows(self, row: RowState, state: GrammarState, token_id: int) -> bool:
        if state.matcher is None or self._filler is None:
            return False
        # `_hold_back_ends` decides about these.
        is_end = token_id in row.params.stop_token_ids or token_id in self._filler.end_token_ids
        return not is_end and state.matcher.surely_allows(token_id)

    def _states_of(self, rows: Sequence[RowState]) -> list[GrammarState | None]:
        return [cast("GrammarState | None", row.states.get(self)) for row in rows]

    def _masks_of(self, rows: Sequence[RowState], states: Sequence[GrammarState | None]) -> Tensor | None:
        if not any(states):
            return None
        masks = self._room_for(len(rows))
        matchers: dict[int, GrammarMatcher] = {}
        for place, state in enumerate(states):
            if state is not None and state.matcher is not None:
                matchers[place] = state.matcher
            else:
                masks[place] = _EVERY_TOKEN if state is None else 0
        if matchers:
            self._fill(masks, matchers, rows)
        return torch.from_numpy(masks)

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


def _is_filtered(row: RowState) -> bool:
    return is_drawn(row.params) and is_filtered(row.params)
