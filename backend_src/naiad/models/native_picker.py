"""`NativePicker`: finds best tokens and draws in rows of logits, by a native call of its own."""

from __future__ import annotations

from typing import Any, cast

import torch

from naiad_kernels.best_tokens import BestTokens, best_tokens
from naiad_kernels.draw_tokens import Draws, draw_tokens
from naiad_kernels.native.library import Team
from naiad_kernels.native.recorder import TapeRecorder, TracedRows
from naiad_kernels.native.tape import Tape


class NativePicker:
    """Picks tokens on a CPU from logits that processors may have changed."""

    def __init__(self, vocab_size: int, team: Team) -> None:
        """Record what a pick does.

        Args:
            vocab_size: number of columns of the logits.
            team: computes the picks.
        """
        recorder = TapeRecorder()
        rows = recorder.rows(vocab_size)
        record_pick(rows)
        self._tape = Tape(recorder.finish(rows), team)

    def __call__(
        self, logits: torch.Tensor, draws: Draws | None, allowed: torch.Tensor | None = None
    ) -> BestTokens:
        """Find each row's best token, and the one that it draws.

        Args:
            logits: `[num_rows, vocab_size]` float32.
            draws: how rows draw, and room for their tokens; None: no row does.
            allowed: the bitmask of `best_tokens`; None: all tokens are allowed.
        """
        best = BestTokens.empty(len(logits))
        self._tape.run(len(logits), inputs=[logits], best=best, allowed=allowed, draws=draws)
        return best


def record_pick(logits: TracedRows) -> None:
    """Write down that best tokens are found in these rows, and that rows draw."""
    best_tokens(cast(Any, logits))
    draw_tokens(cast(Any, logits), cast(Any, None), cast(Any, None))
