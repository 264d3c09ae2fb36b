"""The gate of a GEGLU feed-forward layer."""

from __future__ import annotations

from typing import Literal

import torch

from naiad_kernels.gelu_and_mul import cpu, reference
from naiad_kernels.recording import recordable

__all__ = ["Approximate", "gelu_and_mul"]

Approximate = Literal["none", "tanh"]


@recordable
def gelu_and_mul(gate_up: torch.Tensor, approximate: Approximate) -> torch.Tensor:
    """Compute gelu(first half) · second half over the last dimension.

    Args:
        gate_up: `[num_tokens, 2 * dim]`, any floating dtype.
        approximate: "none" uses the error function; "tanh" uses its usual approximation, which
            checkpoints call `gelu_pytorch_tanh`.

    Returns:
        `[num_tokens, dim]`, dtype of `gate_up`.
    """
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    assert approximate in ("none", "tanh"), approximate
    if gate_up.device.type == "cpu" and gate_up.dtype == torch.float32:
        return cpu.gelu_and_mul(gate_up, approximate)
    if gate_up.device.type == "cuda":
        from naiad_kernels.silu_and_mul import kernel

        return kernel.activate_and_mul(gate_up, "gelu" if approximate == "none" else "gelu_tanh")
    return reference.gelu_and_mul(gate_up, approximate)
