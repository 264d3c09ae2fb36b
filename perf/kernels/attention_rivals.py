"""Other implementations of attention, on contiguous keys and values and on their own pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from perf.kernels.cases import Rival, Run, optional_module
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from naiad_kernels.store_kv import LayerCache

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class EqualSequences:
    """A step whose sequences have the same lengths.

    Attributes:
        query: `[num_seqs, query_len, num_heads, head_dim]`.
        cache: not quantized.
        tables: `[num_seqs, num_blocks]` int64: blocks that are full.
    """

    query: torch.Tensor
    cache: LayerCache
    tables: torch.Tensor

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, `[num_seqs, num_kv_heads, seq_len, head_dim]`."""
        key, value = (
            part[self.tables].transpose(1, 2).flatten(2, 3).contiguous()
            for part in (self.cache.key, self.cache.value)
        )
        return key, value


def attention_rivals(step: EqualSequences) -> dict[str, Rival]:
    """All of them."""
    flash, flashinfer = optional_module("flash_attn"), optional_module("flashinfer")
    # One copy for all of them.
    dense = functools.cache(step.dense)
    return {
        "SDPA": Rival(_at_first_call(lambda: _sdpa(step.query, *dense()))),
        "FlexAttention": Rival(_at_first_call(lambda: _flex(step.query, *dense()))),
        "transformers, paged": Rival(_at_first_call(lambda: _transformers_paged(step.query, *dense()))),
        "FlashInfer": Rival(flashinfer and _at_first_call(lambda: _flashinfer(flashinfer, step, *dense()))),
        "flash-attn": Rival(flash and _at_first_call(lambda: _flash(flash, step.query, *dense()))),
    }


def _at_first_call(make: Callable[[], Run]) -> Run:
    """Prepare a rival when it is called first, which is before it is timed."""
    made = functools.cache(make)
    return lambda: made()()


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Run:
    heads_first = query.transpose(1, 2)
    query_len, seq_len = query.shape[1], key.shape[2]
    is_causal = query_len == seq_len
    mask = None if is_causal or query_len == 1 else causal_lower_right(query_len, seq_len)

    def run() -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            heads_first, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )
        return out.transpose(1, 2)

    return run


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Run:
    heads_first = query.transpose(1, 2)
    query_len, seq_len = query.shape[1], key.shape[2]
    context = seq_len - query_len

    def is_seen(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, col: torch.Tensor
    ) -> torch.Tensor:
        return col <= row + context

    mask = None
    if query_len > 1:
        mask = create_block_mask(is_seen, None, None, query_len, seq_len, device=query.device)
    # Every shape is compiled separately, and the number of compiled variants per function is limited.
    torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    return lambda: attend(heads_first, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2)


def _transformers_paged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Run:
    """As in `generate_batch` with SDPA: gather by index, then one masked product of all tokens with all."""
    num_seqs, query_len, num_heads, head_dim = query.shape
    num_kv_heads, seq_len = key.shape[1:3]
    # Its cache is indexed by token: [num_tokens, num_kv_heads, head_dim].
    flat_key, flat_value = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in (key, value))
    index = torch.arange(len(flat_key), device=query.device)
    packed = query.reshape(1, num_seqs * query_len, num_heads, head_dim).transpose(1, 2)
    within = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
    blocks = [within.tril(seq_len - query_len)] * num_seqs
    mask = torch.block_diag(*blocks)[None, None]  # type: ignore[no-untyped-call]
    module = SimpleNamespace(num_key_value_groups=num_heads // num_kv_heads, training=False, is_causal=False)

    def run() -> torch.Tensor:
        keys, values = (part[index].transpose(0, 1)[None] for part in (flat_key, flat_value))
        out: torch.Tensor = sdpa_attention_forward(module, packed, keys, values, mask)[0]
        return out

    return run


def _flash(flash: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Run:
    # [num_seqs, seq_len, num_kv_heads, head_dim]; its mask is aligned to the last token.
    keys, values = (part.transpose(1, 2).contiguous() for part in (key, value))
    if query.shape[1] > 1:
        return lambda: flash.flash_attn_func(query, keys, values, causal=True)
    lens = torch.full((len(query),), keys.shape[1], dtype=torch.int32, device=query.device)
    return lambda: flash.flash_attn_with_kvcache(query, keys, values, cache_seqlens=lens, causal=True)


def _flashinfer(flashinfer: Any, step: EqualSequences, key: torch.Tensor, value: torch.Tensor) -> Run:
    query = step.query
    num_seqs, query_len, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = step.cache.key.shape
    if num_seqs == 1 and query_len > 1:
        keys, values = (part[0].transpose(0, 1).contiguous() for part in (key, value))
        return lambda: flashinfer.single_prefill_with_kv_cache(query[0], keys, values, causal=True)
    device, num_blocks = query.device, step.tables.shape[1]
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    pages = (starts * num_blocks, step.tables.flatten().int(), torch.full_like(starts[1:], block_size))
    sizes = (num_heads, num_kv_heads, head_dim, block_size)
    if query_len == 1:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        decode.plan(*pages, *sizes, q_data_type=query.dtype, kv_data_type=query.dtype)
        return lambda: decode.run(query[:, 0], (step.cache.key, step.cache.value))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    prefill.plan(starts * query_len, *pages, *sizes, causal=True, q_data_type=query.dtype)
    return lambda: prefill.run(query.flatten(0, 1), (step.cache.key, step.cache.value))
