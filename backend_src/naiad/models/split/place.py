"""`Place`: what one rank has of a model that is split into stages, and each stage into parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from naiad.config import EngineConfig, ModelConfig
from naiad.models.split.part import Part
from naiad.models.split.stage import Stage

_Config = TypeVar("_Config", bound=ModelConfig)


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's stage, and its part of every matrix of the stage.

    Attributes:
        stage: the stage.
        part: the part; all stages have the same number of parts.
    """

    stage: Stage
    part: Part

    @staticmethod
    def of(rank: int, config: EngineConfig) -> Place:
        """The place of a rank; the ranks of a stage follow each other."""
        index, part = divmod(rank, config.tensor_parallel_size)
        return Place(Stage(index, config.pipeline_parallel_size), Part(part, config.tensor_parallel_size))

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return self.rank_at(self.stage.index)

    @property
    def num_ranks(self) -> int:
        """Number of all ranks."""
        return self.stage.count * self.part.size

    @property
    def next_rank(self) -> int:
        """The rank with the same part of the next stage; after the last stage comes the first."""
        return self.rank_at((self.stage.index + 1) % self.stage.count)

    @property
    def previous_rank(self) -> int:
        """The rank with the same part of the stage before; before the first stage comes the last."""
        return self.rank_at((self.stage.index - 1) % self.stage.count)

    def rank_at(self, stage: int) -> int:
        """The rank with the same part of a stage."""
        return stage * self.part.size + self.part.rank

    def config(self, config: _Config) -> _Config:
        """The configuration of this place's part of a model."""
        return self.stage.config(self.part.config(config))
