"""The linear method of batch-invariant models: the order of summation is independent of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.linear.plain import PlainWeight


@dataclass(frozen=True, slots=True)
class FixedOrderWeight(PlainWeight):
    """An unchanged weight, `[out_features, in_features]`, contiguous, and a bias `[out_features]` or None."""

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout; on a CPU this works in triton-lang's interpreter only."""
        from naiad_kernels.linear.fixed_order import kernel

        product = kernel.linear(x, self.matrix, self.bias)
        return product if residual is None else product.add_(residual)
