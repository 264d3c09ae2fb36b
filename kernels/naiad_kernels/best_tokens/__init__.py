"""The best token of each row of logits, perhaps among some that are allowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.best_tokens import reference
from naiad_kernels.recording import recordable

__all__ = ["BestTokens", "best_tokens", "num_mask_words"]


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The best token of each row.

    Attributes:
        token_ids: `[num_rows]` int64: the lowest id among the greatest allowed logits, or among the NaNs if
            there are any; −1: no token is allowed.
        logits: `[num_rows]` float32: that token's; −inf if no token is allowed. It is finite if, and only if,
            the row can be used: it is NaN or +inf if an allowed logit is.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int) -> BestTokens:
        """Make room for the result on a CPU."""
        return cls(torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows))


def num_mask_words(vocab_size: int) -> int:
    """Number of words of a row of a bitmask of allowed tokens."""
    return (vocab_size + 31) // 32


@recordable
def best_tokens(logits: torch.Tensor, allowed: torch.Tensor | None = None) -> BestTokens:
    """Find each row's best allowed token.

    In a recording only `draw_tokens` may follow, and the tape's caller gives the mask with each step.

    Args:
        logits: `[num_rows, vocab_size]` float32.
        allowed: `[num_rows, num_mask_words(vocab_size)]` int32: token i is allowed if bit i % 32 of word
            i // 32 is set; None: all are.
    """
    if allowed is not None:
        return BestTokens(*reference.best_tokens(logits, allowed))
    if logits.device.type == "cpu":
        # NumPy's argmax is vectorized, torch's is not: it takes a tenth of the time.
        token_ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    else:
        token_ids = logits.argmax(dim=1)
    return BestTokens(token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1))
