"""The logits processors that requests can ask for, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from naiad.sampling.masks import AllowedTokens, BadWords, MinTokens
from naiad.sampling.penalties import CountPenalties, LogitBias, RepetitionPenalty
from naiad.sampling.row_state import RowState, Stateful
from naiad.sequence import SamplingParams


class LogitsProcessor(Stateful, Protocol):
    """One kind of change to logits.

    Its state for a row (`new_state`) is in `RowState.states`, with the processor itself as the key. A
    processor whose state is not None needs each token on the host, so steps of its rows do not overlap.
    `applies_to` is called in every step, so it must be fast.
    """

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Change some rows in place, each as if it were alone.

        Args:
            logits: [num_rows, vocab_size] float32, the whole batch.
            rows: index in `logits` → row state, for the rows to which it applies; at least one.
        """


class TopNSigma:
    """Masks tokens whose logit is more than n standard deviations below the greatest.

    As in llama.cpp, the standard deviation is that of the row's finite logits.
    """

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether it is on."""
        return params.top_n_sigma > 0

    def new_state(self, params: SamplingParams) -> None:
        """Return None: no state is needed."""

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Mask, in place."""
        for index, row in rows.items():
            values = logits[index].double()
            is_possible = values.isfinite()
            num_possible = is_possible.sum()
            mean = values.where(is_possible, 0).sum() / num_possible
            variance = (values - mean).where(is_possible, 0).square().sum() / num_possible
            threshold = values.max() - row.params.top_n_sigma * variance.sqrt()
            logits[index].masked_fill_(values < threshold, float("-inf"))


# The order is that of transformers. Masks come last, so that nothing lifts them again.
LOGITS_PROCESSORS: tuple[LogitsProcessor, ...] = (
    LogitBias(),
    RepetitionPenalty(),
    CountPenalties(),
    BadWords(),
    MinTokens(),
    AllowedTokens(),
    TopNSigma(),
)


def apply_processors(processors: Iterable[LogitsProcessor], logits: Tensor, rows: Sequence[RowState]) -> None:
    """Apply each processor to the rows that ask for it, in place.

    Args:
        processors: in the order in which they are applied.
        logits: [num_rows, vocab_size] float32.
        rows: the state of each row.
    """
    for processor in processors:
        chosen = {index: row for index, row in enumerate(rows) if processor.applies_to(row.params)}
        if chosen:
            processor.apply(logits, chosen)
