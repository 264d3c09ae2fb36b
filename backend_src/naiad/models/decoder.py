"""The interface between the model runner and a model: the forward pass and its inputs."""

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
    """The inputs of a step for the layers of one group.

    Attributes:
        slots: where each token's key and value are stored.
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
        """The checkpoint's configuration."""

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run all layers, writing the step's keys and values into the caches.

        Args:
            batch: the step.
            caches: one for each layer.

        Returns:
            `[num_tokens, hidden_size]`, after the final norm.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map rows of `forward`'s result, `[num_rows, hidden_size]`, to `[num_rows, vocab_size]` float32."""


class FamilyModel(DecoderModel, Protocol):
    """What a family computes with a checkpoint's weights."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the embedding of every token: `[num_tokens, hidden_size]`."""

    def run_layers(
        self, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers from given hidden states on; `forward` starts from the embedding.

        Args:
            hidden: `[num_tokens, hidden_size]`, not changed.
            batch: the step; its token ids are not used.
            caches: one for each layer.

        Returns:
            The hidden states after the last layer, with the final norm and without it.
        """

    def first_layers(self, num_layers: int) -> FamilyModel:
        """A model that shares these weights but ends after `num_layers` layers, then final norm and head."""
