"""`TokenEmbedding`: looks up the embedding of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from naiad_kernels.embedding import embedding


class TokenEmbedding(Protocol):
    """The embedding of a model's tokens."""

    def rows(self, token_ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Look up a row for every token, times `factor`: `[num_tokens, hidden_size]`."""


@dataclass(frozen=True, slots=True)
class WholeEmbedding:
    """A `TokenEmbedding` in one table.

    Attributes:
        table: `[vocab_size, hidden_size]`.
    """

    table: torch.Tensor

    def rows(self, token_ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Look up a row for every token; see `TokenEmbedding`."""
        return embedding(token_ids, self.table, factor)
