"""Reference for the LoRA ops, one adapter after the other in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from naiad_kernels.lora.plan import LoraPlan


def lora_shrink(x: torch.Tensor, down: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Compute the public op in float32, in one part, with 0 for tokens without an adapter."""
    shrunk = x.new_zeros((1, down.shape[1], len(x), down.shape[2]), dtype=torch.float32)
    for adapter, tokens in _tokens_of_adapters(plan):
        shrunk[0, :, tokens] = x[tokens].float() @ down[adapter].float().mT
    return shrunk


def lora_expand(
    out: torch.Tensor, shrunk: torch.Tensor, up: torch.Tensor, slice_sizes: tuple[int, ...], plan: LoraPlan
) -> None:
    """Compute the public op in float32 and round once."""
    total = shrunk.sum(0).to(up.dtype).float()
    for adapter, tokens in _tokens_of_adapters(plan):
        parts = torch.split_with_sizes(up[adapter].float(), slice_sizes)
        added = torch.cat([total[index, tokens] @ part.T for index, part in enumerate(parts)], dim=1)
        out[tokens] = (out[tokens].float() + added).to(out.dtype)


def _tokens_of_adapters(plan: LoraPlan) -> Iterator[tuple[int, torch.Tensor]]:
    """Iterate over the adapters in use, each with its tokens."""
    for adapter in sorted(set(plan.adapter_ids.tolist())):
        if adapter >= 0:
            yield adapter, (plan.adapter_ids == adapter).nonzero()[:, 0]
