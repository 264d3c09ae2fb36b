"""`SplitSource`: reads one rank's part of a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Collection

import torch

from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.models.quantised import WeightRows
from naiad.models.sources import WeightSource
from naiad.models.split.part import Part
from naiad.models.split.rows import RowsPart

# Projections whose inputs are split; what they give is summed over the ranks.
SUMMED_PROJECTIONS = ("o_proj", "down_proj")


class SplitSource:
    """A `WeightSource` of a part; the shapes that it is asked for are those of the part.

    Only the pages of a file that hold the part are read; of quantised weights, all that a part of the inputs
    needs is computed from whole rows.
    """

    def __init__(self, whole: WeightSource, config: ModelConfig, part: Part) -> None:
        """Read a part.

        Args:
            whole: reads the checkpoint.
            config: the configuration of the whole model.
            part: the part.
        """
        self._whole = whole
        self._part = part
        heads, kv_heads = (_features(each, config.head_dim) for each in part.heads(config))
        inner, vocabulary = part.features(config), part.of(config.vocab_size)
        num_queries, num_keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # The part of the outputs, or, if its sum is taken, of the inputs; and the number of all of them.
        self._splits = {
            "q_proj": (heads, num_queries),
            "k_proj": (kv_heads, num_keys),
            "v_proj": (kv_heads, num_keys),
            "o_proj": (heads, num_queries),
            "gate_proj": (inner, config.intermediate_size),
            "up_proj": (inner, config.intermediate_size),
            "down_proj": (inner, config.intermediate_size),
            "embed_tokens": (vocabulary, config.vocab_size),
            "lm_head": (vocabulary, config.vocab_size),
        }

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | WeightRows:
        """Read the part of a weight, whose shape is `shape`; see `WeightSource`."""
        layer = name.split(".")[-2]
        if layer not in self._splits:
            if len(shape) > 1:
                raise ModelError(
                    f"tensor {name!r} can not be split over ranks: tensor_parallel_size must be 1"
                )
            return self._whole.read(name, shape)
        own, count = self._splits[layer]
        if layer in SUMMED_PROJECTIONS:
            if len(shape) > 1:
                return _narrowed(self._whole.read(name, (shape[0], count)), 1, own)
            bias = self._whole.read(name, shape)
            # A sum has its bias once.
            return bias if self._part.rank == 0 else torch.zeros(shape)
        return _narrowed(self._whole.read(name, (count, *shape[1:])), 0, own)

    def take_copy(self, name: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Read the part of a copy of the embedding; see `WeightSource`."""
        own, count = self._splits[name.split(".")[-2]]
        whole = self._whole.take_copy(name, (count, shape[1]))
        return None if whole is None else whole.narrow(0, own.start, len(own))

    def leave(self, layers: Collection[int], ends: bool) -> None:
        """Skip weights; see `WeightSource`."""
        self._whole.leave(layers, ends)

    def finish(self) -> None:
        """Close the files; see `WeightSource`."""
        self._whole.finish()


def _features(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _narrowed(weight: torch.Tensor | WeightRows, dimension: int, own: range) -> torch.Tensor | WeightRows:
    if isinstance(weight, torch.Tensor):
        return weight.narrow(dimension, own.start, len(own))
    outputs, inputs = map(range, weight.shape)
    # A weight of one dimension may be one row.
    is_of_inputs = dimension == 1 or len(outputs) == 1
    return RowsPart(weight, outputs, own) if is_of_inputs else RowsPart(weight, own, inputs)
