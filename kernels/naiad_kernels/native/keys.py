"""How keys lie in the native kernels' KV cache; values lie as in torch's."""

from __future__ import annotations

import torch

# A block's tokens lie in groups, so that a group's scores are one vector.
GROUP_TOKENS = 16


def native_keys(keys: torch.Tensor) -> torch.Tensor:
    """View the keys of a cache by token and feature.

    Args:
        keys: `[..., block_size, head_dim]`, float32 or bfloat16: the shape of torch's cache.

    Returns:
        `[..., block_size / 16, head_dim / k, 16, k]`: groups of tokens, features, a group's tokens, and
        the k features that lie side by side: 1 in float32, 2 in bfloat16.
    """
    block_size, head_dim = keys.shape[-2:]
    pair = 4 // keys.dtype.itemsize
    return keys.view(*keys.shape[:-2], block_size // GROUP_TOKENS, head_dim // pair, GROUP_TOKENS, pair)
