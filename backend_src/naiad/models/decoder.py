"""What the model runner knows of a model: the protocol of its forward pass, and what a step gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from naiad.config import ModelConfig
from naiad_kernels.paged_attention import AttentionPlan
from naiad_kernels.store_kv import LayerCache, Slots


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What the layers of one group need of a step.

    Attributes:
        slots: where each token's key and value go.
        attention: which cached tokens each token attends to.
    """

    slots: Slots
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, sequences one after the other.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        groups: one for each of the model's `layer_groups`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: Sequence[GroupInputs]


class DecoderModel(Protocol):
    """Weights of a checkpoint and the forward pass over a paged KV cache."""

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's shape."""

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run all layers, writing the step's keys and values into the caches.

        Args:
            batch: the step.
            caches: one for each layer.

        Returns:
            `[num_tokens, hidden_size]`, after the final norm.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, hidden_size]` of `forward` to `[num_rows, vocab_size]` float32."""

    def first_layers(self, num_layers: int) -> DecoderModel:
        """The same weights without the later layers: final norm and head follow the last that is left."""
