"""A kernel that exposes the noise that the sampling kernels add."""

# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from naiad_kernels.gumbel_argmax.kernel import gumbel_noise


@triton.jit
def noise_probe_kernel(out_ptr, keys_ptr, TILE: tl.constexpr):
    row = tl.program_id(0)
    token_ids = tl.arange(0, TILE)
    tl.store(out_ptr + row * TILE + token_ids, gumbel_noise(tl.load(keys_ptr + row), token_ids))
