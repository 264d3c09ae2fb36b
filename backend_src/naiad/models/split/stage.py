"""`Stage`: which layers of a model some ranks have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from naiad.config import ModelConfig
from naiad.models.split.part import Part

_Config = TypeVar("_Config", bound=ModelConfig)


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the stages that a step goes through. The first also has the embedding and the head.

    Attributes:
        index: which of the stages.
        count: number of stages.
    """

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding and the head."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the model's last layer."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """This stage's layers; stages differ by at most one, and the first have fewer."""
        # Counted from the end: the first parts are larger.
        mirrored = Part(self.count - 1 - self.index, self.count).of(num_layers)
        return range(num_layers - mirrored.stop, num_layers - mirrored.start)

    def config(self, config: _Config) -> _Config:
        """The configuration of a model whose first layers are those of this stage.

        It has the whole model's groups of layers, so that blocks have the same ids at all stages; some may be
        empty.
        """
        own = self.layers(config.num_layers)
        before, after = config.attention[: own.start], config.attention[own.stop :]
        return replace(
            config, num_layers=len(own), attention=config.attention[own.start : own.stop] + before + after
        )

    def largest_share(self, config: ModelConfig) -> float:
        """The largest share that any stage has of the layers of any group.

        No stage's part of a KV cache is a larger share of the whole cache.
        """
        stages = [Stage(index, self.count).config(config) for index in range(self.count)]
        return max(
            len(own.layers) / len(group.layers)
            for stage in stages
            for own, group in zip(stage.layer_groups, config.layer_groups, strict=True)
        )
