"""The Llama family's forward pass: Llama, Mistral, Qwen2 and Qwen3 (dense).

The families differ in biases and in Qwen3's norm of every query and key head; each difference is
a field of `ModelConfig` and appears once below.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from naiad.config import ModelConfig
from naiad.models.layers import ForwardBatch, add_and_norm, load_linear, rope_frequencies
from naiad.models.weights import Checkpoint
from naiad_kernels.linear import LinearWeight, linear, prepare_linear
from naiad_kernels.paged_attention import paged_attention
from naiad_kernels.rms_norm import rms_norm
from naiad_kernels.rotary import rotary_angles
from naiad_kernels.rotary_store_kv import HeadNorm, rotary_store_kv
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; qkv and gate_up are fused projections.

    Attributes:
        qk_norm: of every query and key head, or None.
    """

    input_norm: torch.Tensor
    qkv: LinearWeight
    qk_norm: HeadNorm | None
    attention_output: LinearWeight
    post_attention_norm: torch.Tensor
    gate_up: LinearWeight
    down: LinearWeight


class LlamaModel:
    """Weights of a Llama-family checkpoint and the forward pass over a paged KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """Take every tensor from the checkpoint; `batch_invariant` as for `prepare_linear`.

        Raises:
            ModelError: a tensor is missing, misshapen, unreadable or not part of the architecture.
        """
        self.config = config
        vocab_shape = (config.vocab_size, config.hidden_size)
        self._embedding = checkpoint.take("model.embed_tokens.weight", vocab_shape)
        self._layers = [
            _load_layer(config, checkpoint, index, batch_invariant) for index in range(config.num_layers)
        ]
        self._final_norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        if config.tie_word_embeddings:
            checkpoint.drop("lm_head.weight")
            head = self._embedding
        else:
            head = checkpoint.take("lm_head.weight", vocab_shape)
        self._lm_head = prepare_linear(head, batch_invariant=batch_invariant)
        checkpoint.finish()
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(device)

    def first_layers(self, num_layers: int) -> LlamaModel:
        """The same weights without the later layers: final norm and head follow the last that is left."""
        assert 1 <= num_layers <= self.config.num_layers
        part = copy.copy(self)
        part.config = replace(self.config, num_layers=num_layers)
        part._layers = self._layers[:num_layers]
        return part

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run all layers, writing the step's keys and values into the caches.

        Returns:
            `[num_tokens, hidden_size]`, after the final norm.
        """
        hidden = F.embedding(batch.token_ids, self._embedding)
        angles = rotary_angles(batch.positions, self._frequencies, hidden.dtype)
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden, self._layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for layer, cache, next_norm in zip(self._layers, caches, next_norms, strict=True):
            attended = self._attention(layer, normed, batch, cache, angles)
            norm = layer.post_attention_norm
            normed, hidden = add_and_norm(attended, layer.attention_output, hidden, norm, eps)
            gated = silu_and_mul(linear(normed, layer.gate_up))
            normed, hidden = add_and_norm(gated, layer.down, hidden, next_norm, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, hidden_size]` of `forward` to `[num_rows, vocab_size]` float32."""
        return linear(hidden, self._lm_head).float()

    def _attention(
        self,
        layer: DecoderLayer,
        normed: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """`[num_tokens, hidden_size]` to `[num_tokens, num_heads * head_dim]`."""
        # [num_tokens, heads of queries, keys and values, head_dim]
        heads = linear(normed, layer.qkv).view(len(normed), -1, self.config.head_dim)
        query = rotary_store_kv(heads, angles, layer.qk_norm, cache, batch.slots)
        return paged_attention(query, cache, batch.attention)


def _load_layer(
    config: ModelConfig, checkpoint: Checkpoint, index: int, batch_invariant: bool
) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return DecoderLayer(
        input_norm=checkpoint.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=load_linear(
            checkpoint,
            [f"{attention}.{part}_proj" for part in "qkv"],
            [query_size, kv_size, kv_size],
            hidden,
            config.qkv_bias,
            batch_invariant,
        ),
        qk_norm=_load_qk_norm(config, checkpoint, attention) if config.qk_norm else None,
        attention_output=load_linear(
            checkpoint, [f"{attention}.o_proj"], [hidden], query_size, config.o_bias, batch_invariant
        ),
        post_attention_norm=checkpoint.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=load_linear(
            checkpoint,
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            [inner, inner],
            hidden,
            config.mlp_bias,
            batch_invariant,
        ),
        down=load_linear(checkpoint, [f"{mlp}.down_proj"], [hidden], inner, config.mlp_bias, batch_invariant),
    )


def _load_qk_norm(config: ModelConfig, checkpoint: Checkpoint, attention: str) -> HeadNorm:
    query = checkpoint.take(f"{attention}.q_norm.weight", (config.head_dim,))
    key = checkpoint.take(f"{attention}.k_norm.weight", (config.head_dim,))
    weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
    return HeadNorm(weight, config.rms_norm_eps)
