"""The Gemma family's forward pass: Gemma 2, and Gemma 3 for text.

Embeddings are scaled, each layer has a norm before and after attention and before and after the
feed-forward layer, all norms scale by 1 + weight, and logits may have a soft cap. Windows, soft caps of
scores and ropes are in each layer's `AttentionSpec`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from naiad.config.families.gemma import GemmaConfig
from naiad.models.attention import Attention, attend, load_attention
from naiad.models.decoder import ForwardBatch
from naiad.models.layers import Ropes, load_embedding_and_head, load_linear
from naiad.models.weights import Weights
from naiad_kernels.gelu_and_mul import gelu_and_mul
from naiad_kernels.linear import LinearWeight, linear
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.soft_cap import soft_cap
from naiad_kernels.store_kv import LayerCache


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """One layer's weights; gate_up is a fused projection."""

    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    pre_feedforward_norm: torch.Tensor
    gate_up: LinearWeight
    down: LinearWeight
    post_feedforward_norm: torch.Tensor


class GemmaModel:
    """A `FamilyModel` of the Gemma family."""

    def __init__(self, config: GemmaConfig, checkpoint: Weights) -> None:
        """Load every tensor from the checkpoint.

        Raises:
            ModelError: a tensor is missing, misshapen, unreadable or not part of the architecture.
        """
        self.config = config
        self._embedding, self._lm_head = load_embedding_and_head(config, checkpoint)
        self._layers = [_load_layer(config, checkpoint, index) for index in range(config.num_layers)]
        self._final_norm = _take_norm(checkpoint, "model.norm.weight", (config.hidden_size,))
        checkpoint.finish()
        self._ropes = Ropes(config, checkpoint.options.device)
        # Rounded to the dtype, as in training.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5).to(checkpoint.options.dtype))

    def first_layers(self, num_layers: int) -> GemmaModel:
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
        return self._embedding.rows(token_ids, self._embedding_scale)

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
            attended = rms_norm(linear(attended, layer.attention.output), layer.post_attention_norm, eps)
            normed, hidden = add_rms_norm(attended, hidden, layer.pre_feedforward_norm, eps)
            gated = gelu_and_mul(linear(normed, layer.gate_up), "tanh")
            fed_forward = rms_norm(linear(gated, layer.down), layer.post_feedforward_norm, eps)
            normed, hidden = add_rms_norm(fed_forward, hidden, next_norm, eps)
        return normed, hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of hidden states, in float32."""
        logits = linear(hidden, self._lm_head).float()
        cap = self.config.final_soft_cap
        return soft_cap(logits, cap) if cap else logits


def _take_norm(checkpoint: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return 1 + weight in float32; in fewer bits the sum would lose the weight's last bits."""
    return 1.0 + checkpoint.take(name, shape, torch.float32)


def _load_layer(config: GemmaConfig, checkpoint: Weights, index: int) -> GemmaLayer:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size

    def take_norm(name: str, shape: tuple[int, ...] = (hidden,)) -> torch.Tensor:
        return _take_norm(checkpoint, name, shape)

    return GemmaLayer(
        input_norm=take_norm(f"{prefix}.input_layernorm.weight"),
        attention=load_attention(
            config,
            checkpoint,
            index,
            biases=(config.attention_bias, config.attention_bias),
            take_norm=take_norm if config.qk_norm else None,
        ),
        post_attention_norm=take_norm(f"{prefix}.post_attention_layernorm.weight"),
        pre_feedforward_norm=take_norm(f"{prefix}.pre_feedforward_layernorm.weight"),
        gate_up=load_linear(
            checkpoint,
            [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
            [inner, inner],
            hidden,
            has_bias=False,
        ),
        down=load_linear(checkpoint, [f"{prefix}.mlp.down_proj"], [hidden], inner, has_bias=False),
        post_feedforward_norm=take_norm(f"{prefix}.post_feedforward_layernorm.weight"),
    )
