"""What steps cost: by a device's data sheet, or measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from naiad.cli.plan.devices import Device
from naiad.config import ModelConfig

# What good kernels reach of a data sheet's figures, and what a layer costs however little it computes. With
# these the throughputs that TensorRT-LLM 0.5.0 published for three GPUs come out within 15 %
# (docs/planning.md).
_MEMORY_EFFICIENCY = 0.75
_COMPUTE_EFFICIENCY = 0.6
_LAYER_S = 37e-6


class StepCosts(Protocol):
    """Seconds of steps."""

    def prompt_s(self, num_tokens: float) -> float:
        """Seconds to compute a prompt."""

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of a step in which so many sequences of this length get a token each."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model needs.

    Attributes:
        num_weights: those that a token is multiplied by.
        num_bytes: of all weights.
        kv_bytes: keys and values of a token.
        attention_operations: of a token for each token that it attends to.
        num_layers: number of layers.
    """

    num_weights: float
    num_bytes: float
    kv_bytes: float
    attention_operations: float
    num_layers: int

    @classmethod
    def of(cls, config: ModelConfig, weight_bits: int, kv_bits: int) -> ModelSize:
        """Count, with all layers attending to everything.

        Args:
            config: the model's configuration.
            weight_bits: of a weight of a linear layer; the embedding has 16.
            kv_bits: of an element of the KV cache.
        """
        queries, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        of_layer = config.hidden_size * (2 * queries + 2 * kv_width + 3 * config.intermediate_size)
        head = config.vocab_size * config.hidden_size
        in_layers = config.num_layers * of_layer
        embedding_bytes = 0 if config.tie_word_embeddings else head * 2
        return cls(
            num_weights=in_layers + head,
            num_bytes=in_layers * weight_bits / 8 + head * 2 + embedding_bytes,
            kv_bytes=2 * config.num_layers * kv_width * kv_bits / 8,
            attention_operations=4 * config.num_layers * queries,
            num_layers=config.num_layers,
        )


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step takes as long as its reading or its computing, whichever is longer (Williams et al., 2009).

    Attributes:
        size: of the model.
        device: that computes it.
        bits: of the operands of products.
    """

    size: ModelSize
    device: Device
    bits: int

    def prompt_s(self, num_tokens: float) -> float:
        """Seconds to compute a prompt; each of its tokens attends to half of it on average."""
        operations = num_tokens * (
            2 * self.size.num_weights + self.size.attention_operations * num_tokens / 2
        )
        return self._seconds(self.size.num_bytes, operations)

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of a step; the weights are read once, and each sequence's keys and values."""
        num_bytes = self.size.num_bytes + num_sequences * context * self.size.kv_bytes
        of_token = 2 * self.size.num_weights + self.size.attention_operations * context
        return self._seconds(num_bytes, num_sequences * of_token)

    def _seconds(self, num_bytes: float, operations: float) -> float:
        reading_s = num_bytes / (self.device.bytes_per_s * _MEMORY_EFFICIENCY)
        computing_s = operations / (self.device.operations_per_s[self.bits] * _COMPUTE_EFFICIENCY)
        return max(reading_s, computing_s) + self.size.num_layers * _LAYER_S


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs that were measured; between them they are interpolated.

    Attributes:
        decode: (sequences, seconds of a step) with a short context, fewest sequences first.
        short_context: tokens in it.
        context_s: what each further token of each sequence's context adds.
        prompt_token_s: of a prompt's token, without context.
        pair_s: what each token that it attends to adds.
    """

    decode: Sequence[tuple[int, float]]
    short_context: int
    context_s: float
    prompt_token_s: float
    pair_s: float

    def prompt_s(self, num_tokens: float) -> float:
        """Seconds to compute a prompt."""
        return num_tokens * (self.prompt_token_s + self.pair_s * num_tokens / 2)

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of a step; beyond what was measured it grows in proportion."""
        longer = max(0.0, context - self.short_context)
        return self._short_s(num_sequences) + num_sequences * longer * self.context_s

    def _short_s(self, num_sequences: float) -> float:
        few, few_s = self.decode[0]
        if num_sequences <= few:
            return few_s
        for many, many_s in self.decode[1:]:
            if num_sequences <= many:
                return few_s + (many_s - few_s) * (num_sequences - few) / (many - few)
            few, few_s = many, many_s
        return few_s * num_sequences / few
