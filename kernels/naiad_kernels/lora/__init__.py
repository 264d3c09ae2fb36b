"""Low-rank adapters, chosen per token: y += up[adapter] · (down[adapter] · x)."""

from __future__ import annotations

import torch

from naiad_kernels.lora import reference
from naiad_kernels.lora.plan import LoraPlan, plan_lora

__all__ = ["MAX_RANK", "LoraPlan", "lora_expand", "lora_shrink", "plan_lora"]

MAX_RANK = 128


def lora_shrink(x: torch.Tensor, down: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Multiply each token's vector by the down projection of its adapter.

    Args:
        x: `[num_tokens, in_dim]`, float32, float16 or bfloat16.
        down: `[num_adapters, num_slices, max_rank, in_dim]`, dtype of `x`, contiguous; a slice is
            one of the fused projections (queries, keys, values; gate, up). Rows from an
            adapter's own rank to max_rank are 0. max_rank ≤ MAX_RANK.
        plan: from `plan_lora`, for these tokens.

    Returns:
        `[num_parts, num_slices, num_tokens, max_rank]` float32: partial sums over `in_dim`, which
        `lora_expand` adds up. Rows of tokens without an adapter are undefined.
    """
    assert x.shape == (len(plan.adapter_ids), down.shape[3]), (x.shape, down.shape)
    assert x.dtype == down.dtype, (x.dtype, down.dtype)
    assert down.is_contiguous()
    assert 1 <= down.shape[2] <= MAX_RANK, down.shape
    if x.device.type == "cuda":
        from naiad_kernels.lora import kernel

        return kernel.lora_shrink(x, down, plan)
    return reference.lora_shrink(x, down, plan)


def lora_expand(
    out: torch.Tensor, shrunk: torch.Tensor, up: torch.Tensor, slice_sizes: tuple[int, ...], plan: LoraPlan
) -> None:
    """Multiply each token's shrunk vector by the up projection of its adapter; add it to `out` in place.

    Args:
        out: `[num_tokens, out_dim]`, the projection without adapters; elements of a row are
            contiguous. Rows of tokens without an adapter are not touched.
        shrunk: from `lora_shrink`; its sum is rounded to the dtype of `out`.
        up: `[num_adapters, out_dim, max_rank]`, dtype of `out`, contiguous, scaled by alpha / rank.
            Columns from an adapter's own rank to max_rank are 0.
        slice_sizes: number of rows of `up` for each slice; their sum is out_dim.
        plan: from `plan_lora`, for these tokens.
    """
    assert out.shape == (len(plan.adapter_ids), up.shape[1]), (out.shape, up.shape)
    assert out.stride(1) == 1, out.stride()
    assert shrunk.shape[1:] == (len(slice_sizes), len(out), up.shape[2]), (shrunk.shape, up.shape)
    assert sum(slice_sizes) == up.shape[1], (slice_sizes, up.shape)
    assert shrunk.dtype == torch.float32, shrunk.dtype
    assert out.dtype == up.dtype, (out.dtype, up.dtype)
    assert up.is_contiguous()
    if out.device.type == "cuda":
        from naiad_kernels.lora import kernel

        kernel.lora_expand(out, shrunk, up, slice_sizes, plan)
    else:
        reference.lora_expand(out, shrunk, up, slice_sizes, plan)
