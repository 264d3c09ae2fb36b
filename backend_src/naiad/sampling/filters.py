"""Top-k and top-p as one threshold per row.

A token is kept if its logit is not below the threshold. So tokens that tie with the last one
kept are kept too, and the kept set is a function of the row's logits alone, whatever order a
sort leaves ties in.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_threshold(values: Tensor, top_k: Tensor, top_p: Tensor, total_mass: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest value that each row keeps; top-p counts within what top-k leaves.

    Args:
        values: [num_rows, width] float64, descending: the row's best scaled logits, less its
            greatest one (so the first is 0).
        top_k: [num_rows] int64, 0 = off, at most `width`.
        top_p: [num_rows] float64, 1 = off.
        total_mass: [num_rows] float64: the sum of exp(value) over the row's whole vocabulary;
            used where top-p is on and top-k is off.

    Returns:
        The thresholds, [num_rows, 1] float64, and whether each is that of the whole row,
        [num_rows] bool: no token beyond `values` could be kept too or move it.
    """
    last = values[:, -1:]
    has_top_k = (top_k > 0).unsqueeze(1)
    has_top_p = (top_p < 1).unsqueeze(1)
    kth = values.gather(1, (top_k - 1).clamp(min=0).unsqueeze(1))
    by_top_k = torch.where(has_top_k, kth, last)
    masses = values.exp().masked_fill_(values < by_top_k, 0)
    cumulated = masses.cumsum(1)
    total = torch.where(has_top_k, cumulated[:, -1:], total_mass.unsqueeze(1))
    # A token is needed if the better ones do not have the mass yet; the best always is.
    needed = cumulated - masses < top_p.unsqueeze(1) * total
    last_needed = (needed.sum(1, keepdim=True) - 1).clamp(min=0)
    by_top_p = torch.where(has_top_p, values.gather(1, last_needed), last)
    threshold = torch.maximum(by_top_k, by_top_p)
    # A tie with the k-th may go on beyond `values`, and then its mass is missing here.
    is_final = (threshold > last) & (~has_top_k | (kth > last))
    return threshold, is_final.squeeze(1)
