"""Adapters of several ranks and the tokens that use them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from naiad_kernels.lora import plan_lora, reference


class LoraCase:
    """Arguments of both ops; `x` is part of a wider tensor whose other columns are NaN."""

    def __init__(
        self,
        ids: Sequence[int],
        in_dim: int,
        slice_sizes: tuple[int, ...],
        ranks: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        torch.manual_seed(len(ids) + in_dim)
        self.slice_sizes = slice_sizes
        max_rank, out_dim = max(ranks), sum(slice_sizes)
        self.x = torch.full((len(ids), in_dim + 3), torch.nan, dtype=dtype)[:, :in_dim]
        self.out = torch.empty(len(ids), out_dim, dtype=dtype)
        self.down = torch.randn(len(ranks), len(slice_sizes), max_rank, in_dim).to(dtype) / in_dim**0.5
        self.up = torch.randn(len(ranks), out_dim, max_rank).to(dtype)
        for each in (self.x, self.out):
            each.copy_(torch.randn(each.shape))
        for adapter, rank in enumerate(ranks):
            self.down[adapter, :, rank:] = 0
            self.up[adapter, :, rank:] = 0
        self.plan = plan_lora(torch.tensor(ids, dtype=torch.int64), len(ranks))

    def of_token(self, token: int) -> LoraCase:
        """The same adapters for one token."""
        alone = copy(self)
        alone.x, alone.out = (each[token : token + 1].clone() for each in (self.x, self.out))
        alone.plan = plan_lora(self.plan.adapter_ids[token : token + 1], len(self.up))
        return alone

    def expected(self) -> torch.Tensor:
        """The reference's output."""
        out = self.out.clone()
        shrunk = reference.lora_shrink(self.x, self.down, self.plan)
        reference.lora_expand(out, shrunk, self.up, self.slice_sizes, self.plan)
        return out
