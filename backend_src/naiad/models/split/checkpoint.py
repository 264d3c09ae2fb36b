"""`SplitCheckpoint`: one rank's part of a checkpoint, and how it is computed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from naiad.config import ModelConfig
from naiad.models.split.part import Part
from naiad.models.split.rank_group import RankGroup
from naiad.models.split.source import SUMMED_PROJECTIONS, SplitSource
from naiad.models.weights import Checkpoint, Prepared
from naiad_kernels.embedding import embedding
from naiad_kernels.linear import LinearWeight, LoadOptions


class SplitCheckpoint(Checkpoint):
    """A `Checkpoint` of one part, for a model with the part's configuration."""

    def __init__(
        self, directory: str, options: LoadOptions, config: ModelConfig, part: Part, group: RankGroup
    ) -> None:
        """Open every weight file.

        Args:
            directory: as in `Checkpoint`.
            options: as in `Checkpoint`.
            config: the configuration of the whole model.
            part: the part that is read.
            group: the ranks that have the parts.
        """
        super().__init__(directory, options, config)
        self._source = SplitSource(self._source, config, part)
        self._vocabulary = part.of(config.vocab_size)
        self._group = group

    def prepared(self, name: str, make: Callable[[Checkpoint], Prepared]) -> Prepared:
        """Make it; where a projection's inputs are split, its outputs are summed over the ranks."""
        made = super().prepared(name, make)
        if name.endswith(SUMMED_PROJECTIONS):
            assert not isinstance(made, torch.Tensor)
            return cast(Prepared, SummedWeight(made, self._group))
        return made

    def embedding(self, table: torch.Tensor) -> SplitEmbedding:
        """The embedding of the whole vocabulary, of which this rank has `table`."""
        return SplitEmbedding(table, self._vocabulary.start, self._group)


class SummedWeight:
    """A `LinearWeight` for some of the inputs, whose product is summed over the ranks."""

    def __init__(self, part: LinearWeight, group: RankGroup) -> None:
        """Sum what `part` gives."""
        self._part = part
        self._group = group

    @property
    def in_features(self) -> int:
        """Number of this rank's input features."""
        return self._part.in_features

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return self._part.out_features

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear`; the residual is the same at all ranks and is added once."""
        total = self._group.sum(self._part.multiply(x, None))
        return total if residual is None else total.add_(residual)


class SplitEmbedding:
    """A `TokenEmbedding` whose tokens are split: each row comes from the rank that has it."""

    def __init__(self, table: torch.Tensor, first_id: int, group: RankGroup) -> None:
        """Look up rows.

        Args:
            table: `[num_ids, hidden_size]`, the rows of this rank.
            first_id: the id of the table's first row.
            group: has the other rows.
        """
        self._table = table
        self._first_id = first_id
        self._group = group

    def rows(self, token_ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Look up a row for every token; see `TokenEmbedding`."""
        places = token_ids - self._first_id
        is_elsewhere = (places < 0) | (places >= len(self._table))
        rows = embedding(places.masked_fill(is_elsewhere, 0), self._table, factor)
        return self._group.sum(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))
