"""What a decoder layer is made of: how its weights are loaded, fused and applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from naiad.config.model_config import RopeConfig
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LinearWeight, linear, prepare_linear
from naiad_kernels.paged_attention import AttentionPlan
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.store_kv import Slots


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, sequences one after the other.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        slots: where each token's key and value go.
        attention: which cached tokens each token sees.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: Slots
    attention: AttentionPlan


def load_linear(
    checkpoint: Checkpoint,
    names: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    has_bias: bool,
    batch_invariant: bool,
) -> LinearWeight:
    """Take projections that read the same input and fuse them, one below the other.

    Args:
        checkpoint: the projections are taken from it.
        names: without ".weight" and ".bias".
        out_features: of each.
        in_features: of all.
        has_bias: whether each has a bias.
        batch_invariant: see `prepare_linear`.
    """
    sizes = list(zip(names, out_features, strict=True))
    matrix = torch.cat([checkpoint.take(f"{name}.weight", (size, in_features)) for name, size in sizes])
    bias = None
    if has_bias:
        bias = torch.cat([checkpoint.take(f"{name}.bias", (size,)) for name, size in sizes])
    return prepare_linear(matrix, bias, batch_invariant=batch_invariant)


def add_and_norm(
    x: torch.Tensor, projection: LinearWeight, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's projection, the sum with what went around the layer, and the norm that follows.

    Args:
        x: `[num_tokens, in_features]`.
        projection: to the model's hidden size.
        residual: `[num_tokens, hidden_size]`, not changed.
        norm: `[hidden_size]`, weight.
        eps: added to the mean square.

    Returns:
        The normalised sum, and the sum: `[num_tokens, hidden_size]` each.
    """
    if x.device.type == "cuda":
        return add_rms_norm(linear(x, projection), residual, norm, eps)
    # On a CPU the product adds for nothing.
    total = linear(x, projection, residual=residual)
    return rms_norm(total, norm, eps), total


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position of each feature pair: `[head_dim / 2]` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between interpolated."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies
