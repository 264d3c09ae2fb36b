"""Changes to logits that requests ask for, in the one order in which they are applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from naiad.sampling.masks import AllowedTokens, BadWords, MinTokens
from naiad.sampling.penalties import CountPenalties, LogitBias, RepetitionPenalty
from naiad.sampling.row_state import RowState, Stateful
from naiad.sequence import SamplingParams


class LogitsProcessor(Stateful, Protocol):
    """One kind of change.

    What it keeps of a row (`new_state`) is found in `RowState.states` under the processor itself. A
    processor whose state is not None needs to know each token, so the steps of its rows do not overlap.
    `applies_to` is asked in every step, so keep it short.
    """

    def apply(self, logits: Tensor, rows: Mapping[int, RowState]) -> None:
        """Change some rows in place, each as if it were alone.

        Args:
            logits: [num_rows, vocab_size] float32, the whole batch.
            rows: index in `logits` → sequence, of the rows to which it applies; at least one.
        """


class TopNSigma:
    """Tokens whose logit is more than n standard deviations below the greatest are impossible.

    As in llama.cpp: the deviation is that of the row's finite logits around their mean.
    """

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether it is on."""
        return params.top_n_sigma > 0

    def new_state(self, params: SamplingParams) -> None:
        """Nothing: the row's tokens do not matter."""

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


# As in transformers. Masks come last: what is impossible stays so.
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
        processors: in order.
        logits: [num_rows, vocab_size] float32.
        rows: the sequence of each row.
    """
    for processor in processors:
        chosen = {index: row for index, row in enumerate(rows) if processor.applies_to(row.params)}
        if chosen:
            processor.apply(logits, chosen)
