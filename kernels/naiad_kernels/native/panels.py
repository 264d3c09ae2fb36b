"""Matrices in panels of 16 outputs, as the native kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from naiad_kernels.native.library import Matrix, Product

PANEL_OUTPUTS = 16
# Inputs are padded to a multiple of this, and so are the rows of a tape's buffers.
ALIGNMENT = 64
# Whether a matrix can be narrowed is found out in parts of as many rows, to need little memory.
_NARROWED_ROWS = 1024


def padded(size: int, multiple: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def narrowed(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix in bfloat16 if that holds it exactly, else the matrix itself.

    Args:
        matrix: `[rows, columns]`, float32 or bfloat16.
    """
    parts = [matrix[first : first + _NARROWED_ROWS] for first in range(0, len(matrix), _NARROWED_ROWS)]
    is_exact = all(torch.equal(part.bfloat16().to(part.dtype), part) for part in parts)
    return matrix.bfloat16() if is_exact else matrix


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight in panels, with its bias.

    Attributes:
        panels: `[num_panels, in_features padded / k, 16, k]`: float32 with k = 1, or bfloat16 with k = 2.
        bias: `[num_panels * 16]` float32, or None.
        product: what it is multiplied as.
        in_features, out_features: of the layer.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    product: Product
    in_features: int
    out_features: int

    @classmethod
    def of(
        cls, matrix: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> NativeWeight:
        """Lay out a weight for computing in a dtype.

        A float32 weight that bfloat16 holds exactly is kept in 16 bits: products and sums are the float32
        ones, and half as many bytes are read.

        Args:
            matrix: `[out_features, in_features]`, float32 or bfloat16, on the CPU.
            bias: `[out_features]`, or None.
            dtype: float32 or bfloat16; None: the matrix's own. A bfloat16 matrix suits both.
        """
        out_features, in_features = matrix.shape
        product = Product.BF16_BY_BF16
        if (dtype or matrix.dtype) == torch.float32:
            matrix = narrowed(matrix)
            product = Product.FLOAT_BY_FLOAT if matrix.dtype == torch.float32 else Product.FLOAT_BY_BF16
        return cls(
            panels=_panels(matrix),
            bias=None if bias is None else _padded_bias(bias),
            product=product,
            in_features=in_features,
            out_features=out_features,
        )

    def as_matrix(self) -> Matrix:
        """As records name it; this weight has to outlive them."""
        return Matrix(
            panels=self.panels.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_panels=len(self.panels),
            in_features=padded(self.in_features),
            product=self.product,
        )

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Refuse tensors: native kernels multiply by this weight within a recorded step only."""
        raise TypeError("a native weight is multiplied in a recorded step, not by tensors")


def _panels(matrix: torch.Tensor) -> torch.Tensor:
    out_features, in_features = matrix.shape
    step = 1 if matrix.dtype == torch.float32 else 2
    num_panels = -(-out_features // PANEL_OUTPUTS)
    missing = (0, padded(in_features) - in_features, 0, num_panels * PANEL_OUTPUTS - out_features)
    whole = F.pad(matrix, missing) if any(missing) else matrix
    return whole.view(num_panels, PANEL_OUTPUTS, -1, step).transpose(1, 2).contiguous()


def _padded_bias(bias: torch.Tensor) -> torch.Tensor:
    return F.pad(bias.float(), (0, padded(len(bias), PANEL_OUTPUTS) - len(bias))).contiguous()
