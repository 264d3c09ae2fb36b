"""What `rejection_sampling` is given: one row of logits for each token that a step may emit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The element of a row's noise that decides on its draft: no token has this id.
ACCEPT_NOISE_ID = -1
# What a token keeps of its target probability where the draft's is larger. Rounding can leave
# nothing to recover from although a draft was rejected; this keeps the target's own tokens then.
RESIDUAL_FLOOR = 2.0**-80


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target's laws: softmax of (logit − best) / temperature over tokens at or above a threshold.

    Attributes:
        logits: `[num_rows, vocab_size]` float32, no NaN.
        best: `[num_rows]` float32, each row's largest logit, finite.
        temperature: `[num_rows]` float64; 0 takes the lowest id of the best tokens.
        threshold: `[num_rows]` float64, ≤ 0; the smallest scaled logit that is possible, −inf: any.
        keys: `[num_rows]` int64, of the noise; no draft may have been drawn with the same ones.
    """

    logits: torch.Tensor
    best: torch.Tensor
    temperature: torch.Tensor
    threshold: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the rows verify.

    Attributes:
        token_ids: `[num_rows]` int64, the draft for the token that a row is the law of; −1 in each
            sequence's last row, which has none.
        probs: `[num_rows, vocab_size]` float32, the law that each draft was drawn from; last rows
            are not read. None: drafts are guesses without a law.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor | None
