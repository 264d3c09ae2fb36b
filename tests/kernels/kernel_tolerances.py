"""How far a kernel may be from its float32 reference: the one place for these numbers."""

from __future__ import annotations

import torch

# Of the largest and of the root-mean-square error, both relative to the reference's size.
MAX_RELATIVE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}
RMS_RELATIVE = {torch.float16: 8e-4, torch.bfloat16: 4e-3, torch.float32: 4e-6}


def assert_close_to_reference(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Both errors are within the tolerance of the tensors' dtype, and every value is finite.

    An element's error is relative to its own size, or to the root mean square of the reference
    where that is larger.
    """
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.isfinite().all(), "not finite"
    if expected.numel() == 0:
        return
    wide_actual, wide_expected = actual.double(), expected.double()
    rms = wide_expected.square().mean().sqrt()
    size = torch.maximum(wide_expected.abs(), rms).clamp_min(1e-30)
    errors = (wide_actual - wide_expected).abs() / size
    assert errors.max() <= MAX_RELATIVE[actual.dtype], f"largest error {errors.max():.2e}"
    rms_error = errors.square().mean().sqrt()
    assert rms_error <= RMS_RELATIVE[actual.dtype], f"error {rms_error:.2e}"
