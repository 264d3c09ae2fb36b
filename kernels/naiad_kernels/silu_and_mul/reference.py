"""Reference for `silu_and_mul`, in plain float32 torch."""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute the public op in float32 and round once, at the end."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
