"""Ragged drafts for rejection sampling, and a small model whose exact law is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from naiad.sampling.noise import noise_key
from naiad_kernels.gumbel_argmax import gumbel_argmax
from naiad_kernels.rejection_sampling import Drafts, TargetRows


def ragged_case(
    num_drafts: Sequence[int], vocab_size: int, has_probs: bool
) -> tuple[TargetRows, Drafts, torch.Tensor, int]:
    """Arguments of the op; −1 drafts: a sequence without rows. What must not be read is NaN.

    Every third row is greedy, every second has a threshold, some tokens are impossible.
    """
    torch.manual_seed(len(num_drafts) + vocab_size)
    starts = list(accumulate((count + 1 for count in num_drafts), initial=0))
    num_rows = starts[-1]
    logits = torch.full((num_rows, vocab_size + 3), torch.nan)[:, :vocab_size]
    logits.copy_(torch.randn(num_rows, vocab_size) * 2)
    logits[:, vocab_size // 2 + 1 :: 5] = -torch.inf
    keys = torch.tensor([noise_key(7, row) for row in range(num_rows)], dtype=torch.int64)
    target = TargetRows(
        logits,
        logits.max(1).values,
        torch.tensor([0.0, 0.7, 1.3], dtype=torch.float64).repeat(num_rows)[:num_rows],
        torch.tensor([-torch.inf, -4.0], dtype=torch.float64).repeat(num_rows)[:num_rows],
        keys,
    )
    probs = (logits + torch.randn(num_rows, vocab_size)).softmax(1)
    guesses = probs.multinomial(1)[:, 0] if num_rows else keys
    token_ids = torch.where(torch.rand(num_rows) < 0.6, tokens_without_drafts(target), guesses)
    for end in starts[1:]:
        token_ids[max(end - 1, 0) : end] = -1
        probs[max(end - 1, 0) : end] = torch.nan
    drafts = Drafts(token_ids, probs if has_probs else None)
    return target, drafts, torch.tensor(starts, dtype=torch.int32), max([0, *num_drafts])


def tokens_without_drafts(target: TargetRows) -> torch.Tensor:
    """The token of each row by its own noise, `[num_rows]`."""
    is_greedy = target.temperature == 0
    temperature = target.temperature.masked_fill(is_greedy, 1)
    drawn = gumbel_argmax(target.logits, target.best, temperature, target.threshold, target.keys)
    return torch.where(is_greedy, target.logits.max(1).indices, drawn)


class MarkovModel:
    """A language model that sees one token: row t of its logits is what follows token t."""

    def __init__(self, logits: torch.Tensor, temperature: float = 1.0, threshold: float = -torch.inf) -> None:
        self.logits, self.temperature, self.threshold = logits, temperature, threshold
        scaled = (logits.double() - logits.amax(1, keepdim=True)) / temperature
        self.probs = scaled.masked_fill(scaled < threshold, -torch.inf).softmax(1)

    def rows(self, last: torch.Tensor, keys: torch.Tensor) -> TargetRows:
        """The laws of what follows each of `last`."""
        logits = self.logits[last]
        temperature = torch.full(last.shape, self.temperature, dtype=torch.float64)
        threshold = torch.full(last.shape, self.threshold, dtype=torch.float64)
        return TargetRows(logits, logits.amax(1), temperature, threshold, keys)

    def draw(self, last: torch.Tensor) -> torch.Tensor:
        """A next token for each of `last`, by torch's own generator."""
        return self.probs[last].multinomial(1)[:, 0]

    def joint(self, first: int, length: int) -> torch.Tensor:
        """Exact probabilities of the `vocab_size ** length` continuations of `first`, in order."""
        joint, last = torch.ones(1, dtype=torch.float64), torch.tensor([first])
        vocab_size = len(self.logits)
        for _ in range(length):
            joint = (joint[:, None] * self.probs[last]).flatten()
            last = torch.arange(vocab_size).repeat(len(joint) // vocab_size)
        return joint
