"""Matrices in panels of 16 outputs, as the native kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from naiad_kernels.array_check import check_array
from naiad_kernels.native.library import Matrix, Product
from naiad_kernels.native.nibbles import PART_ROWS, NibbleWeight

PANEL_OUTPUTS = 16
# Inputs are padded to a multiple of this, and so are the rows of a tape's buffers.
ALIGNMENT = 64
# The products of float32 inputs by weights of these dtypes.
_BY_STORED = {
    torch.float32: Product.FLOAT_BY_FLOAT,
    torch.bfloat16: Product.FLOAT_BY_BF16,
    torch.float16: Product.FLOAT_BY_F16,
}
# The dtype of each product's panels, and how many inputs of an output lie side by side.
_LAYOUTS = {
    Product.FLOAT_BY_FLOAT: (torch.float32, 1),
    Product.FLOAT_BY_BF16: (torch.bfloat16, 2),
    Product.FLOAT_BY_F16: (torch.float16, 1),
    Product.BF16_BY_BF16: (torch.bfloat16, 2),
    Product.INT8_BY_INT8: (torch.uint8, 4),
}
# Bytes of 64 inputs of a panel in four bits: numbers, scales in float16, and zero points or minimums.
_NIBBLE_STEP_BYTES = {
    Product.INT4_BY_INT8: 512 + 64 + 32,
    Product.INT4_AND_MINIMUM_BY_INT8: 512 + 64 + 64,
}


def padded(size: int, multiple: int = ALIGNMENT) -> int:
    """Return the next multiple."""
    return -(-size // multiple) * multiple


def narrowed(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix in bfloat16 or float16 if that holds it exactly, else the matrix itself.

    Args:
        matrix: `[rows, columns]`, float32 or bfloat16.
    """
    parts = torch.split(matrix, PART_ROWS)
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts):
            return matrix.to(dtype)
    return matrix


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight in panels, with its bias.

    Attributes:
        panels: `[num_panels, in_features padded / k, 16, k]`: float32 and float16 with k = 1, bfloat16 with
            k = 2, or uint8 with k = 4, which holds whole numbers within ±127 plus 128. In four bits
            `[num_panels, in_features padded / 64, bytes]`, as `src/nibbles.h` says.
        bias: `[num_panels * 16]` float32, or None.
        scales: `[num_panels * 16]` float32, what a whole number stands for in each output; else None.
        product: what it is multiplied as.
        in_features, out_features: of the layer.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    product: Product
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        """See that nothing is missing; see `check`."""
        self.check()

    def check(self) -> None:
        """See that every array has all that native code reads, and not more.

        Raises:
            ValueError: an array is not as the product and the layer's features demand.
        """
        num_panels = -(-self.out_features // PANEL_OUTPUTS)
        if self.product in _NIBBLE_STEP_BYTES:
            dtype, rest = torch.uint8, (padded(self.in_features) // 64, _NIBBLE_STEP_BYTES[self.product])
            check_array("panels", self.panels, dtype, (num_panels, *rest))
        else:
            dtype, step = _LAYOUTS[self.product]
            shape = (num_panels, padded(self.in_features) // step, PANEL_OUTPUTS, step)
            check_array("panels", self.panels, dtype, shape)
        if (self.scales is not None) != (self.product == Product.INT8_BY_INT8):
            raise ValueError(f"scales beside panels for {self.product.name}, or none")
        for name, values in (("bias", self.bias), ("scales", self.scales)):
            if values is not None:
                check_array(name, values, torch.float32, (num_panels * PANEL_OUTPUTS,))

    @classmethod
    def of(
        cls, matrix: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> NativeWeight:
        """Lay out a weight for computing in a dtype.

        A float32 weight that bfloat16 or float16 holds exactly is kept in 16 bits: products and sums are the
        float32 ones, and half as many bytes are read.

        Args:
            matrix: `[out_features, in_features]`, float32 or bfloat16, on the CPU.
            bias: `[out_features]`, or None.
            dtype: float32 or bfloat16; None: the matrix's own. A bfloat16 matrix suits both.
        """
        product = Product.BF16_BY_BF16
        if (dtype or matrix.dtype) == torch.float32:
            matrix = narrowed(matrix)
            product = _BY_STORED[matrix.dtype]
        step = 2 if matrix.dtype == torch.bfloat16 else 1
        return cls._of_panels(_panels(matrix, step), bias, matrix, product)

    @classmethod
    def quantised(cls, matrix: torch.Tensor, bias: torch.Tensor | None) -> NativeWeight:
        """Round a weight to eight bits, with one scale for each output.

        Args:
            matrix: `[out_features, in_features]`, a floating dtype, on the CPU.
            bias: `[out_features]`, or None.
        """
        parts = [_rounded(part) for part in torch.split(matrix, PART_ROWS)]
        panels, scales = map(torch.cat, zip(*parts, strict=True))
        return cls._of_panels(panels, bias, matrix, Product.INT8_BY_INT8, scales)

    @classmethod
    def of_nibbles(cls, weight: NibbleWeight, bias: torch.Tensor | None) -> NativeWeight:
        """Lay out a weight of four bits.

        Args:
            weight: on the CPU.
            bias: `[out_features]`, or None.
        """
        panels = weight.panels(PANEL_OUTPUTS)
        product = Product.INT4_AND_MINIMUM_BY_INT8 if weight.has_minimums else Product.INT4_BY_INT8
        return cls._of_panels(panels, bias, weight.numbers, product)

    @classmethod
    def _of_panels(
        cls,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        matrix: torch.Tensor,
        product: Product,
        scales: torch.Tensor | None = None,
    ) -> NativeWeight:
        return cls(
            panels=panels,
            bias=None if bias is None else _padded_outputs(bias),
            scales=None if scales is None else _padded_outputs(scales),
            product=product,
            in_features=matrix.shape[1],
            out_features=matrix.shape[0],
        )

    def as_matrix(self) -> Matrix:
        """Return the weight as records refer to it; it must outlive them."""
        return Matrix(
            panels=self.panels.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            num_panels=len(self.panels),
            in_features=padded(self.in_features),
            product=self.product,
        )

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Refuse tensors: native kernels multiply by this weight within a recorded step only."""
        raise TypeError("a native weight is multiplied in a recorded step, not by tensors")


def _panels(matrix: torch.Tensor, step: int) -> torch.Tensor:
    out_features, in_features = matrix.shape
    num_panels = -(-out_features // PANEL_OUTPUTS)
    missing = (0, padded(in_features) - in_features, 0, num_panels * PANEL_OUTPUTS - out_features)
    whole = F.pad(matrix, missing) if any(missing) else matrix
    return whole.view(num_panels, PANEL_OUTPUTS, -1, step).transpose(1, 2).contiguous()


def _rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Panels of whole numbers plus 128, and what one of them stands for in each output."""
    scales = matrix.abs().amax(1).float() / 127
    whole = (matrix.float() / torch.where(scales > 0, scales, 1.0)[:, None]).round_()
    return _panels(whole.to(torch.int8), 4).view(torch.uint8).bitwise_xor_(128), scales


def _padded_outputs(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values.float(), (0, padded(len(values), PANEL_OUTPUTS) - len(values))).contiguous()
