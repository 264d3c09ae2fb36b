"""The gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch

from naiad_kernels.recording import recordable
from naiad_kernels.silu_and_mul import cpu, reference

__all__ = ["silu_and_mul"]


@recordable
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(first half) · second half over the last dimension.

    Args:
        gate_up: `[num_tokens, 2 * dim]`, any floating dtype.

    Returns:
        `[num_tokens, dim]`, dtype of `gate_up`.
    """
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    if gate_up.device.type == "cpu" and gate_up.dtype == torch.float32:
        return cpu.silu_and_mul(gate_up)
    if gate_up.device.type == "cuda":
        from naiad_kernels.silu_and_mul import kernel

        return kernel.activate_and_mul(gate_up, "silu")
    return reference.silu_and_mul(gate_up)
