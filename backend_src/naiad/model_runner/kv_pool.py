"""The KV cache's tensors and their size."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError
from naiad_kernels.store_kv import LayerCache


class KVPool:
    """Keys and values of all blocks of all layers, in one allocation.

    Zeros, not uninitialised memory: attention multiplies a block's unwritten rest by zero, and
    zero times NaN is NaN.

    Attributes:
        num_blocks: blocks in the pool.
        layers: each layer's part.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate; on a CPU memory is only taken as blocks are written."""
        self.num_blocks = num_blocks
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [LayerCache(key=layer[0], value=layer[1]) for layer in self._tensor]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer, one after the other."""
        for source, target in pairs:
            self._tensor[:, :, target] = self._tensor[:, :, source]

    def first_layers(self, num_layers: int) -> KVPool:
        """The pool as a model of fewer layers sees it; what is copied or cleared is so in all layers."""
        part = copy.copy(self)
        part.layers = self.layers[:num_layers]
        return part

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Clear slots, block × block_size + offset each, in every layer."""
        index = torch.tensor(slots, dtype=torch.int64, device=self._tensor.device)
        block_size = self._tensor.shape[4]
        self._tensor[:, :, index // block_size, :, index % block_size] = 0

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in every layer."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self._tensor.device)
        self._tensor.index_fill_(2, index, 0)


def num_pool_blocks(
    config: EngineConfig, model_configs: Sequence[ModelConfig], dtype: torch.dtype, kv_cache_bytes: int
) -> int:
    """Blocks that fit, but no more than `max_num_seqs` sequences of full length can use.

    Args:
        config: says how large blocks are.
        model_configs: each has keys and values in every block; the first is the one that is served.
        dtype: of keys and values.
        kv_cache_bytes: for all of them.

    Raises:
        ConfigError: not even one block fits.
    """
    num_numbers = sum(2 * each.num_layers * each.num_kv_heads * each.head_dim for each in model_configs)
    block_bytes = num_numbers * config.block_size * dtype.itemsize
    if kv_cache_bytes < block_bytes:
        raise ConfigError("kv_cache_bytes", kv_cache_bytes, f"at least one block of {block_bytes} bytes")
    limit = model_configs[0].max_position_embeddings
    longest = min(config.max_model_len or limit, limit)
    useful = config.max_num_seqs * -(-longest // config.block_size)
    return min(kv_cache_bytes // block_bytes, useful)
