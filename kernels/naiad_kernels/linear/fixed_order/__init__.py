"""The method of a batch-invariant model: the order of a sum does not depend on the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FixedOrderWeight:
    """A weight as it came: `[out_features, in_features]`, contiguous; bias `[out_features]` or None."""

    matrix: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        """Columns of the layer's input."""
        return self.matrix.shape[1]

    @property
    def out_features(self) -> int:
        """Columns of the layer's output."""
        return self.matrix.shape[0]

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout; on a CPU, in triton-lang's interpreter only."""
        from naiad_kernels.linear.fixed_order import kernel

        product = kernel.linear(x, self.matrix, self.bias)
        return product if residual is None else product.add_(residual)
