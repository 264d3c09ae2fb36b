"""`SplitCheckpoint`: one rank's share of a checkpoint, and how it is computed with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from naiad.config import ModelConfig
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup
from naiad.models.split.source import SUMMED_PROJECTIONS, SplitSource
from naiad.models.split.stage_source import StageSource
from naiad.models.token_embedding import TokenEmbedding, WholeEmbedding
from naiad.models.weights import Checkpoint
from naiad_kernels.embedding import embedding
from naiad_kernels.linear import LinearWeight, LoadOptions


class SplitCheckpoint(Checkpoint):
    """A `Checkpoint` of one place, for a model with the place's configuration.

    Attributes:
        has_ends: whether the embedding and the head are there.
    """

    def __init__(
        self, directory: str, options: LoadOptions, config: ModelConfig, place: Place, group: RankGroup
    ) -> None:
        """Open every weight file.

        Args:
            directory: as in `Checkpoint`.
            options: as in `Checkpoint`.
            config: the configuration of the whole model.
            place: whose weights are read.
            group: the ranks that have the others.
        """
        super().__init__(directory, options, config)
        self.has_ends = place.stage.is_first
        self._part = place.part
        if place.stage.count > 1:
            self._source = StageSource(self._source, config.num_layers, place.stage)
        if place.part.size > 1:
            self._source = SplitSource(self._source, config, place.part)
        self._vocabulary = place.part.of(config.vocab_size)
        self._group = group

    def prepared_linear(
        self, name: str, shape: tuple[int, int], make: Callable[[Checkpoint], LinearWeight]
    ) -> LinearWeight:
        """Make it; where a projection's inputs are split, its outputs are summed over the ranks."""
        made = super().prepared_linear(name, shape, make)
        if self._part.size > 1 and name.endswith(SUMMED_PROJECTIONS):
            return SummedWeight(made, self._group)
        return made

    def embedding(self, table: torch.Tensor) -> TokenEmbedding:
        """The embedding of the whole vocabulary, of which this rank has `table`."""
        if self._part.size == 1:
            return WholeEmbedding(table)
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


class AtFirstStage:
    """In place of the embedding and the head at the later stages of a model, which use neither."""

    in_features = 0
    out_features = 0

    def rows(self, token_ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Never called; see `TokenEmbedding`."""
        raise AssertionError("the embedding is at the first stage")

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Never called; see `LinearWeight`."""
        raise AssertionError("the head is at the first stage")
