"""Causal grouped-query attention over a paged KV cache, for any mix of query lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from naiad_kernels.paged_attention import chunks, single
from naiad_kernels.paged_attention.plan import AttentionPlan, attention_sort_key, plan_attention
from naiad_kernels.recording import recordable
from naiad_kernels.store_kv import LayerCache

__all__ = ["AttentionPlan", "attention_sort_key", "paged_attention", "plan_attention"]


@recordable
def paged_attention(
    query: torch.Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Let each token attend to its own sequence's cached tokens up to and including itself.

    In a plan with a window it attends only to those within the window.

    The keys and values of the step's own tokens must already be in the cache. All vectors in a
    sequence's own blocks must be finite, including the unwritten rest of its last block. The contents of
    other blocks do not matter, nor those of blocks entirely before the window.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, sequences one after the other as in the plan.
        cache: in the dtype of `query`, or quantized.
        plan: from `plan_attention` for the same step and the same shapes.
        scale: factor of the scores; None: 1 / √head_dim.
        soft_cap: c > 0: scores become c · tanh(score / c); 0: no soft cap.

    Returns:
        `[num_tokens, num_heads * head_dim]`, dtype of `query`.
    """
    assert query.shape[0] == plan.num_tokens, (query.shape, plan.num_tokens)
    cache.check(query.dtype)
    if scale is None:
        scale = float(query.shape[-1] ** -0.5)
    if plan.device_step is not None:
        from naiad_kernels.paged_attention import kernel

        return kernel.paged_attention(query, cache, plan.device_step, scale, soft_cap)
    parts: Sequence[torch.Tensor] = [
        *(single.attend(query[group.tokens], cache, group, scale, soft_cap) for group in plan.singles),
        *(chunks.attend(query[group.tokens], cache, group, scale, soft_cap) for group in plan.chunks),
    ]
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
