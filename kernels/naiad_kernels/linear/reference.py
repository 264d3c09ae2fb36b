"""Reference for `linear`, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def linear(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Compute the public op."""
    product = F.linear(x, matrix, bias)
    return product if residual is None else product.add_(residual)
