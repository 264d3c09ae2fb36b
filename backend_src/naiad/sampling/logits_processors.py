"""Changes to logits that requests ask for, in the one order in which they are applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from naiad.sampling.masks import AllowedTokens, BadWords, MinTokens
from naiad.sampling.penalties import CountPenalties, LogitBias, RepetitionPenalty
from naiad.sampling.sampled_row import SampledRow
from naiad.sequence import SamplingParams


class LogitsProcessor(Protocol):
    """One kind of change. It keeps nothing of a row: a row may be computed again."""

    @property
    def reads_tokens(self) -> bool:
        """Whether `apply` reads a row's `token_ids`: then no step runs ahead of the last one's ids."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters is changed; asked in every step, so keep it short."""

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
        """Change some rows in place, each as if it were alone.

        Args:
            logits: [num_rows, vocab_size] float32, the whole batch.
            rows: index in `logits` → sequence, of the rows to which it applies; at least one.
        """


class TopNSigma:
    """Tokens whose logit is more than n standard deviations below the greatest are impossible.

    As in llama.cpp: the deviation is that of the row's finite logits around their mean.
    """

    reads_tokens = False

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether it is on."""
        return params.top_n_sigma > 0

    def apply(self, logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
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


def apply_processors(
    processors: Iterable[LogitsProcessor], logits: Tensor, rows: Sequence[SampledRow]
) -> None:
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
