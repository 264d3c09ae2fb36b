"""`Part`: which heads, features and tokens of a model one rank has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError

# Numbers of features that are not cut, if that leaves something for each part: the usual sizes of groups.
_UNITS = (128, 64, 32)
_Config = TypeVar("_Config", bound=ModelConfig)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of everything that is split.

    Attributes:
        rank: which of the parts.
        size: number of parts.
    """

    rank: int
    size: int

    def of(self, count: int) -> range:
        """This part of `count` things in a row; parts differ by at most one, and the first are larger."""
        share, num_larger = divmod(count, self.size)
        start = self.rank * share + min(self.rank, num_larger)
        return range(start, start + share + (self.rank < num_larger))

    def features(self, config: ModelConfig) -> range:
        """The MLP's features of this part.

        Those of a quantised checkpoint come in groups that share a scale, which should not be cut.
        """
        count = config.intermediate_size
        if config.quantised is None:
            return self.of(count)
        unit = next((each for each in _UNITS if not count % each and count // each >= self.size), 1)
        units = self.of(count // unit)
        return range(units.start * unit, units.stop * unit)

    def heads(self, config: ModelConfig) -> tuple[range, range]:
        """The query heads and the KV heads of this part; every query head is with its KV head.

        KV heads are split if there is one for each rank. Otherwise several ranks have the same KV head and
        share its query heads.
        """
        num_queries = config.num_heads // config.num_kv_heads
        if self.size <= config.num_kv_heads:
            kv_heads = self.of(config.num_kv_heads)
            return range(kv_heads.start * num_queries, kv_heads.stop * num_queries), kv_heads
        kv_heads_of = [rank * config.num_kv_heads // self.size for rank in range(self.size)]
        kv_head = kv_heads_of[self.rank]
        sharing = Part(self.rank - kv_heads_of.index(kv_head), kv_heads_of.count(kv_head))
        queries, first = sharing.of(num_queries), kv_head * num_queries
        return range(first + queries.start, first + queries.stop), range(kv_head, kv_head + 1)

    def config(self, config: _Config) -> _Config:
        """The configuration of this part of a model; its vocabulary remains whole."""
        heads, kv_heads = self.heads(config)
        return replace(
            config,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            intermediate_size=len(self.features(config)),
        )

    def kv_cache_bytes(self, config: ModelConfig, num_bytes: int) -> int:
        """This part of a KV cache of `num_bytes`, for parts that all have the same number of blocks."""
        all_parts = [Part(rank, self.size) for rank in range(self.size)]
        num_kv_heads = sum(len(part.heads(config)[1]) for part in all_parts)
        return num_bytes * len(self.heads(config)[1]) // num_kv_heads


def part_configs(config: _Config, size: int) -> list[_Config]:
    """The configurations of all parts of a model."""
    return [Part(rank, size).config(config) for rank in range(size)]


def check_can_split(engine_config: EngineConfig, config: ModelConfig) -> None:
    """Refuse a model that so many stages and parts can not share.

    Raises:
        ConfigError: it has fewer heads than parts, or fewer layers than stages.
    """
    size = engine_config.tensor_parallel_size
    if size > config.num_heads:
        expected = f"1 … {config.num_heads}, the number of heads of {engine_config.model_dir}"
        raise ConfigError("tensor_parallel_size", size, expected)
    num_stages = engine_config.pipeline_parallel_size
    if num_stages > config.num_layers:
        expected = f"1 … {config.num_layers}, the number of layers of {engine_config.model_dir}"
        raise ConfigError("pipeline_parallel_size", num_stages, expected)
