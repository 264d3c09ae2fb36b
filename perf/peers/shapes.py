"""What is measured: how many sequences of which lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    *(Shape("context", batch, 1000, 64) for batch in (1, 32)),
    *(Shape("context", batch, 4000, 64) for batch in (1, 8)),
)
REHEARSAL = (Shape("decode", 2, 16, 8), Shape("prefill", 1, 32, 1))


def kv_tokens(shapes: Sequence[Shape]) -> int:
    """How many tokens the KV cache must hold for any one of the shapes, each sequence rounded up."""
    return max(
        shape.batch * -(-(shape.prompt_tokens + shape.new_tokens) // _KV_ROUND) * _KV_ROUND
        for shape in shapes
    )


def weight_bytes(config: ModelConfig, contestant: Contestant) -> int:
    """Bytes of all weights that a decode step reads, the head included."""
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    layer = 2 * config.hidden_size * heads + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    return int(weights * contestant.weight_bytes)


def kv_token_bytes(config: ModelConfig, contestant: Contestant) -> int:
    """Bytes of a token in the KV cache."""
    return int(2 * config.num_layers * config.num_kv_heads * config.head_dim * contestant.kv_bytes)


def step_bytes(config: ModelConfig, contestant: Contestant, shape: Shape) -> float:
    """Bytes that a decode step must read: the weights once, and the cached tokens, averaged over steps."""
    cached = shape.batch * (shape.prompt_tokens + shape.new_tokens / 2)
    return weight_bytes(config, contestant) + cached * kv_token_bytes(config, contestant)
