"""The tolerances between kernels and their float32 references, all in one place."""

from __future__ import annotations

import torch

# Of the largest and of the root-mean-square error, both relative to the reference's size. The largest is
# eight roundings in 16 bits: bfloat16 has three bits fewer than float16.
MAX_RELATIVE = {torch.float16: 4e-3, torch.bfloat16: 8 * 4e-3, torch.float32: 2e-5}
RMS_RELATIVE = {torch.float16: 8e-4, torch.bfloat16: 4e-3, torch.float32: 4e-6}

# Of attention over a quantized cache, root-mean-square, against the cache before.
QUANTIZED_RMS_RELATIVE = {torch.int8: 1.2e-2, torch.float8_e4m3fn: 4.5e-2}


def assert_close_to_unquantized(
    actual: torch.Tensor, expected: torch.Tensor, cache_dtype: torch.dtype
) -> None:
    """Assert that attention of normally distributed vectors loses no more than the codes' precision."""
    error = (actual - expected).float().square().mean().sqrt() / expected.float().square().mean().sqrt()
    assert error <= QUANTIZED_RMS_RELATIVE[cache_dtype], f"error {error:.2e}"


def assert_codes_close(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], max_share: float
) -> None:
    """Assert that codes and scales agree; a share of int8 codes may differ by one from the expected ones."""
    assert_close_to_reference(actual[1].nan_to_num(), expected[1].nan_to_num())
    assert torch.equal(actual[1].isnan(), expected[1].isnan())
    difference = (actual[0].float() - expected[0].float()).abs()
    assert difference.max() <= (1 if max_share else 0), f"a code is {difference.max():g} away"
    share = difference.count_nonzero() / difference.numel()
    assert share <= max_share, f"{share:.1%} of the codes differ"


def assert_close_to_reference(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that both errors are within the tolerance of the dtype, and that every value is finite.

    An element's error is relative to its own size, or to the root mean square of the reference if
    that is larger.
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
