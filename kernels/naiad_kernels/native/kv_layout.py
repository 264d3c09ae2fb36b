"""How keys and values lie in the native kernels' KV cache."""

from __future__ import annotations

import torch

# A block's tokens lie in groups, so that a group's scores are one vector.
GROUP_TOKENS = 16


def native_keys(keys: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """View the keys of a cache by token and feature.

    Args:
        keys: `[..., block_size, head_dim]`, float32, bfloat16 or int8 codes: the shape of torch's cache.
        dtype: as which codes are multiplied, float32 or bfloat16; None: keys are no codes.

    Returns:
        `[..., block_size / 16, head_dim / k, 16, k]`: groups of tokens, features, a group's tokens, and
        the k features that lie side by side: 1 in float32, 2 in bfloat16.
    """
    block_size, head_dim = keys.shape[-2:]
    together = _together(dtype or keys.dtype)
    num_groups = block_size // GROUP_TOKENS
    return keys.view(*keys.shape[:-2], num_groups, head_dim // together, GROUP_TOKENS, together)


def native_values(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """View the values of a cache by token and feature.

    Args:
        values: `[..., block_size, head_dim]`, float32, bfloat16 or int8 codes: the shape of torch's cache.
        dtype: as which codes are multiplied, float32 or bfloat16; None: values are no codes.

    Returns:
        `[..., block_size / k, head_dim, k]`: tokens, features, and the k tokens whose features lie side
        by side: 1 in float32, 2 in bfloat16.
    """
    block_size, head_dim = values.shape[-2:]
    together = _together(dtype or values.dtype)
    return values.view(*values.shape[:-2], block_size // together, head_dim, together)


def _together(dtype: torch.dtype) -> int:
    """Elements that a lane multiplies at once."""
    return 4 // dtype.itemsize
