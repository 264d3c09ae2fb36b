"""The Llama family's forward pass: Llama, Mistral, Qwen2 and Qwen3 (dense).

The architectures differ in biases and in Qwen3's norm of every query and key head; each difference is
a field of `LlamaConfig` and appears once below.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from naiad.config.families.llama import LlamaConfig
from naiad.models.attention import Attention, attend, load_attention
from naiad.models.decoder import ForwardBatch
from naiad.models.layers import Ropes, add_and_norm, load_embedding_and_head, load_linear
from naiad.models.weights import Weights
from naiad_kernels.linear import LinearWeight, linear
from naiad_kernels.rms_norm import rms_norm
from naiad_kernels.silu_and_mul import silu_and_mul
from naiad_kernels.store_kv import LayerCache


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's weights; gate_up is a fused projection."""

    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    gate_up: LinearWeight
    down: LinearWeight


class LlamaModel:
    """A `FamilyModel` of the Llama family."""

    def __init__(self, config: LlamaConfig, checkpoint: Weights) -> None:
        """Load every tensor from the checkpoint.

        Raises:
            ModelError: a tensor is missing, misshapen, unreadable or not part of the architecture.
        """
        self.config = config
        self._embedding, self._lm_head = load_embedding_and_head(config, checkpoint)
        self._layers = [_load_layer(config, checkpoint, index) for index in range(config.num_layers)]
        self._final_norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        checkpoint.finish()
        self._ropes = Ropes(config, checkpoint.options.device)

    def first_layers(self, num_layers: int) -> LlamaModel:
        """Share these weights, without the later layers."""
        assert 1 <= num_layers <= self.config.num_layers
        part = copy.copy(self)
        part.config = replace(self.config, num_layers=num_layers)
        part._layers = self._layers[:num_layers]
        return part

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run all layers, as `DecoderModel` describes."""
        return self.run_layers(self.embed(batch.token_ids), batch, caches)[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the embedding of every token, as `FamilyModel` describes."""
        return self._embedding.rows(token_ids)

    def run_layers(
        self, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers from hidden states on, as `FamilyModel` describes."""
        all_angles = self._ropes.angles(batch.positions, hidden.dtype)[: self.config.num_layers]
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden, self._layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        steps = zip(self._layers, caches, all_angles, next_norms, strict=True)
        for layer, cache, angles, next_norm in steps:
            attended = attend(layer.attention, normed, batch, cache, angles)
            norm = layer.post_attention_norm
            normed, hidden = add_and_norm(attended, layer.attention.output, hidden, norm, eps)
            gated = silu_and_mul(linear(normed, layer.gate_up))
            normed, hidden = add_and_norm(gated, layer.down, hidden, next_norm, eps)
        return normed, hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of hidden states, in float32."""
        return linear(hidden, self._lm_head).float()


def _load_layer(config: LlamaConfig, checkpoint: Weights, index: int) -> LlamaLayer:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    return LlamaLayer(
        input_norm=checkpoint.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        attention=load_attention(
            config,
            checkpoint,
            index,
            biases=(config.qkv_bias, config.o_bias),
            take_norm=checkpoint.take if config.qk_norm else None,
        ),
        post_attention_norm=checkpoint.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=load_linear(
            checkpoint,
            [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
            [inner, inner],
            hidden,
            config.mlp_bias,
        ),
        down=load_linear(checkpoint, [f"{prefix}.mlp.down_proj"], [hidden], inner, config.mlp_bias),
    )
