"""A layer's attention: its weights, and the computation over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from naiad.config import AttentionSpec, ModelConfig
from naiad.models.decoder import ForwardBatch
from naiad.models.layers import load_linear
from naiad.models.weights import Weights
from naiad_kernels.linear import LinearWeight, linear
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.rotary_store_kv import HeadNorm, rotary_store_kv
from naiad_kernels.store_kv import LayerCache

TakeNorm = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention weights and its specification.

    Attributes:
        qkv: the fused projection to queries, keys and values.
        qk_norm: the norm of every query and key head, or None.
        output: the projection back to the hidden size.
        spec: how the layer attends.
        group: which of the model's `layer_groups` the layer belongs to.
        head_dim: features of one head.
    """

    qkv: LinearWeight
    qk_norm: HeadNorm | None
    output: LinearWeight
    spec: AttentionSpec
    group: int
    head_dim: int


def load_attention(
    config: ModelConfig,
    checkpoint: Weights,
    index: int,
    biases: tuple[bool, bool],
    take_norm: TakeNorm | None,
) -> Attention:
    """Load one layer's attention.

    Args:
        config: the model's configuration.
        checkpoint: contains the weights.
        index: the layer's index.
        biases: whether the projections to queries, keys and values have biases, and whether the output
            projection has one.
        take_norm: loads the weight of a norm by name and shape; None: heads are not normalised.
    """
    name = f"model.layers.{index}.self_attn"
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    spec = config.attention[index]
    windows = [group.window for group in config.layer_groups]
    return Attention(
        qkv=load_linear(
            checkpoint,
            [f"{name}.{part}_proj" for part in "qkv"],
            [query_size, kv_size, kv_size],
            config.hidden_size,
            biases[0],
        ),
        qk_norm=None if take_norm is None else _load_head_norm(config, name, take_norm),
        output=load_linear(checkpoint, [f"{name}.o_proj"], [config.hidden_size], query_size, biases[1]),
        spec=spec,
        group=windows.index(spec.window),
        head_dim=config.head_dim,
    )


def attend(
    attention: Attention,
    normed: torch.Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Attend, without the output projection.

    Args:
        attention: the layer's attention.
        normed: `[num_tokens, hidden_size]`.
        batch: the step.
        cache: the layer's; the step's keys and values are written to it.
        angles: the layer's rotations, as `rotary_angles` computes them.

    Returns:
        `[num_tokens, num_heads * head_dim]`.
    """
    # [num_tokens, heads of queries, keys and values, head_dim]
    num_heads = attention.qkv.out_features // attention.head_dim
    heads = linear(normed, attention.qkv).view(-1, num_heads, attention.head_dim)
    inputs, spec = batch.groups[attention.group], attention.spec
    query = rotary_store_kv(heads, angles, attention.qk_norm, cache, inputs.slots)
    return paged_attention(query, cache, inputs.attention, spec.scale, spec.soft_cap)


def _load_head_norm(config: ModelConfig, name: str, take_norm: TakeNorm) -> HeadNorm:
    query = take_norm(f"{name}.q_norm.weight", (config.head_dim,))
    key = take_norm(f"{name}.k_norm.weight", (config.head_dim,))
    weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
    return HeadNorm(weight, config.rms_norm_eps)
