"""What `paged_attention` computes, in plain float32 torch: one sequence and one head at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
) -> torch.Tensor:
    """See the public op; the step is given as plain lists instead of a plan."""
    num_tokens, num_heads, head_dim = query.shape
    group_size = num_heads // key_cache.shape[1]
    result = torch.full((num_tokens, num_heads, head_dim), torch.nan)
    token = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens, block_tables, strict=True):
        # Shape [seq_len, num_kv_heads, head_dim] both.
        keys = key_cache[list(table)].transpose(1, 2).flatten(0, 1)[:seq_len].float()
        values = value_cache[list(table)].transpose(1, 2).flatten(0, 1)[:seq_len].float()
        for index in range(query_len):
            visible = seq_len - query_len + index + 1
            for head in range(num_heads):
                kv_head = head // group_size
                scores = keys[:visible, kv_head] @ query[token, head].float() * head_dim**-0.5
                result[token, head] = scores.softmax(0) @ values[:visible, kv_head]
            token += 1
    return result.flatten(1).to(query.dtype)
