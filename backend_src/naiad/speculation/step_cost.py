"""Estimates the duration of steps from measurements."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class StepCost:
    """Seconds that a step takes, by its number of tokens.

    The cost is measured at a few numbers of tokens and interpolated linearly between them. Below the
    first it is constant; beyond the last it grows proportionally, as it does when arithmetic is the
    bottleneck. Fewer tokens never cost more: if a measurement says so, another program disturbed it.

    Each token of a sequence's context beyond the measured context adds a known cost.

    Attributes:
        drawn_s: additional seconds for each token that is drawn instead of taken greedily.
    """

    def __init__(
        self,
        measured: Iterable[tuple[int, float]],
        context: Iterable[tuple[int, float]] = (),
        num_context: int = 0,
        drawn_s: float = 0.0,
    ) -> None:
        """Build the cost function from measurements.

        Args:
            measured: (tokens, seconds), in ascending order of tokens; both > 0.
            context: (tokens of one sequence in the step, seconds that each further token of its context
                costs), in the same order; empty: context costs nothing.
            num_context: number of context tokens in `measured`.
            drawn_s: additional seconds for each token that is drawn instead of taken greedily.
        """
        tokens, seconds = zip(*measured, strict=True)
        self._tokens = np.array(tokens, dtype=np.float64)
        self._seconds = np.minimum.accumulate(np.array(seconds, dtype=np.float64)[::-1])[::-1]
        assert (np.diff(self._tokens, prepend=0.0) > 0).all(), "tokens do not ascend from 1"
        assert min(seconds) > 0, "a step takes time"
        window, each_s = zip(*context, strict=True) if context else ((1,), (0.0,))
        self._window = np.array(window, dtype=np.float64)
        self._each_s = np.maximum.accumulate(np.array(each_s, dtype=np.float64))
        self._num_context = num_context
        self._of_number: dict[int, float] = {}
        self._each_of_window: dict[int, float] = {}
        self.drawn_s = drawn_s

    def __call__(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the seconds of steps with these numbers of tokens."""
        seconds = np.interp(num_tokens, self._tokens, self._seconds)
        seconds *= np.maximum(num_tokens / self._tokens[-1], 1)
        return seconds

    def at(self, num_tokens: int) -> float:
        """Return the seconds of a step with this number of tokens.

        They are remembered for each number that is asked for, at most as many as a step may have tokens.
        """
        known = self._of_number.get(num_tokens)
        if known is None:
            known = self._of_number[num_tokens] = float(self(np.array(num_tokens)))
        return known

    def of_context_at(self, num_tokens: int, num_context: int) -> float:
        """Return the seconds that one sequence's context beyond the measured one adds."""
        each_s = self._each_of_window.get(num_tokens)
        if each_s is None:
            each_s = float(np.interp(num_tokens, self._window, self._each_s))
            self._each_of_window[num_tokens] = each_s
        return each_s * max(num_context - self._num_context, 0)

    def of_context(
        self, num_tokens: npt.NDArray[np.int64], num_context: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return the seconds that context beyond the measured one adds, by tokens of the sequence."""
        beyond = np.maximum(num_context - self._num_context, 0)
        seconds = np.interp(num_tokens, self._window, self._each_s)
        return np.multiply(seconds, beyond, dtype=np.float64)
