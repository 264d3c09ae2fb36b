"""The KV cache's tensors and their size."""

from __future__ import annotations

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

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in every layer."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self._tensor.device)
        self._tensor.index_fill_(2, index, 0)


def num_pool_blocks(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, kv_cache_bytes: int
) -> int:
    """Blocks that fit, but no more than `max_num_seqs` sequences of full length can use.

    Raises:
        ConfigError: not even one block fits.
    """
    heads_dim = model_config.num_kv_heads * model_config.head_dim
    block_bytes = 2 * model_config.num_layers * heads_dim * config.block_size * dtype.itemsize
    if kv_cache_bytes < block_bytes:
        raise ConfigError("kv_cache_bytes", kv_cache_bytes, f"at least one block of {block_bytes} bytes")
    longest = min(
        config.max_model_len or model_config.max_position_embeddings, model_config.max_position_embeddings
    )
    useful = config.max_num_seqs * -(-longest // config.block_size)
    return min(kv_cache_bytes // block_bytes, useful)
