"""The rows of a table that token ids name."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from naiad_kernels.recording import recordable

__all__ = ["embedding"]


@recordable
def embedding(token_ids: torch.Tensor, table: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Look up a row for every token.

    Args:
        token_ids: `[num_tokens]` int64.
        table: `[vocab_size, dim]`, any floating dtype.
        factor: of every row; 1: none.

    Returns:
        `[num_tokens, dim]`, dtype of `table`, a new tensor.
    """
    rows = F.embedding(token_ids, table)
    return rows if factor == 1.0 else rows.mul_(factor)
