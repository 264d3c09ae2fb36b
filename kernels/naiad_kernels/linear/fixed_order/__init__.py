"""The method of a batch-invariant model: the order of a sum does not depend on the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.linear.plain import PlainWeight


@dataclass(frozen=True, slots=True)
class FixedOrderWeight(PlainWeight):
    """A weight as it came, `[out_features, in_features]`, contiguous, and a bias `[out_features]` or None."""

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout; on a CPU, in triton-lang's interpreter only."""
        from naiad_kernels.linear.fixed_order import kernel

        product = kernel.linear(x, self.matrix, self.bias)
        return product if residual is None else product.add_(residual)
