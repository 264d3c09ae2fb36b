"""Reference for `gelu_and_mul`, in plain float32 torch."""

from __future__ import annotations

import math

import torch


def gelu_and_mul(gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute the public op in float32 and round once, at the end."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if approximate == "tanh":
        share = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    else:
        share = torch.erf(gate / math.sqrt(2))
    return (0.5 * gate * (1 + share) * up).to(gate_up.dtype)
