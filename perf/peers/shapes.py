"""What is measured: how many sequences of which lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.peers.bounds import Need
from perf.peers.contestants import Contestant

from naiad.config import ModelConfig

_KV_ROUND = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences that start together.

    Attributes:
        kind: "decode", "prefill", or "context": decode after long prompts.
        batch: number of sequences.
        prompt_tokens, new_tokens: of each sequence; 1 new token for prefill.
    """

    kind: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.kind} {self.batch} × {self.prompt_tokens}+{self.new_tokens}"


QUICK = (
    *(Shape("decode", batch, 128, 128) for batch in (1, 8, 32)),
    *(Shape("prefill", 1, length, 1) for length in (256, 1024)),
)
LONG = (
    *QUICK,
    # Many new tokens, so that the first sequence does not end before the last has its first; as many as the
    # room for KV, which is rounded up, holds anyway.
    *(Shape("context", batch, 1000, 280) for batch in (1, 32)),
    *(Shape("context", batch, 4000, 352) for batch in (1, 8)),
)
REHEARSAL = (Shape("decode", 2, 16, 8), Shape("prefill", 1, 32, 1), Shape("context", 2, 32, 16))


def kv_tokens(shapes: Sequence[Shape]) -> int:
    """How many tokens the KV cache must hold for any one of the shapes, each sequence rounded up."""
    return max(
        shape.batch * -(-(shape.prompt_tokens + shape.new_tokens) // _KV_ROUND) * _KV_ROUND
        for shape in shapes
    )


def weight_bytes(config: ModelConfig, contestant: Contestant) -> int:
    """Bytes of all weights that a decode step reads, the head included."""
    head = _head_weights(config) * (contestant.head_bytes or contestant.weight_bytes)
    return int(_layer_weights(config) * contestant.weight_bytes + head)


def kv_token_bytes(config: ModelConfig, contestant: Contestant) -> int:
    """Bytes of a token in the KV cache."""
    return int(2 * config.num_layers * config.num_kv_heads * config.head_dim * contestant.kv_bytes)


def need(config: ModelConfig, contestant: Contestant, shape: Shape) -> Need:
    """The least that a decode step of a shape must do, or else all of its prefill.

    A step reads the weights once, and the cached tokens; it is averaged over the steps. Only the last token
    of a prompt needs the head. Layers are taken to attend to all tokens. A product and its addition are two
    operations.
    """
    batch, length = shape.batch, shape.prompt_tokens
    if shape.new_tokens == 1:
        products: float = batch * (length * _layer_weights(config) + _head_weights(config))
        products += batch * (length * (length + 1) / 2) * _token_products(config)
        written = batch * length * kv_token_bytes(config, contestant)
        return Need(weight_bytes(config, contestant) + written, 2 * products)
    cached = batch * (length + shape.new_tokens / 2)
    products = batch * (_layer_weights(config) + _head_weights(config)) + cached * _token_products(config)
    return Need(weight_bytes(config, contestant) + cached * kv_token_bytes(config, contestant), 2 * products)


def _layer_weights(config: ModelConfig) -> int:
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    layer = 2 * config.hidden_size * heads + 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer


def _head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def _token_products(config: ModelConfig) -> int:
    """Products of one query with the key and the value of one token, in all layers."""
    return 2 * config.num_layers * config.num_heads * config.head_dim
