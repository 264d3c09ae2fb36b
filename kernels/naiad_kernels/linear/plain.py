"""The method of every device and dtype that has no faster one: torch's own product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.linear import reference


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight as it came: `[out_features, in_features]`, bias `[out_features]` or None."""

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
        """Compute `linear` for this layout."""
        return reference.linear(x, self.matrix, self.bias, residual)
