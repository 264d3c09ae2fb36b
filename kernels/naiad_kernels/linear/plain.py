"""The linear method for devices and dtypes that have no faster one: torch's own product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from naiad_kernels.linear import reference


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """An unchanged weight, `[out_features, in_features]`, and a bias `[out_features]` or None."""

    matrix: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return self.matrix.shape[1]

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return self.matrix.shape[0]

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compute `linear` for this layout."""
        return reference.linear(x, self.matrix, self.bias, residual)
