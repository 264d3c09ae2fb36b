"""The shapes that are measured: those of Llama-3-8B, and tiny ones to rehearse on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model's layer and of the steps that are measured.

    Attributes:
        dtype: dtype of weights and activations.
        heads: query heads, KV heads, head_dim.
        hidden_size, intermediate_size, vocab_size: the model's.
        block_size: tokens in a block of the cache.
        decode: (sequences, cached tokens of each).
        prefill: (tokens of one sequence, cached tokens before them).
        num_tokens: numbers of tokens for element-wise ops and adapters.
        num_rows: numbers of rows for sampling.
        product_tokens: numbers of tokens for the widest layer; other layers are measured with one token.
        product_side: side of the square product.
        copy_bytes: bytes of the copy.
    """

    dtype: torch.dtype
    heads: tuple[int, int, int]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    num_tokens: tuple[int, ...]
    num_rows: tuple[int, ...]
    product_tokens: tuple[int, ...]
    product_side: int
    copy_bytes: int

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Name of a product → its inputs and outputs."""
        num_heads, num_kv_heads, head_dim = self.heads
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "qkv": (hidden, (num_heads + 2 * num_kv_heads) * head_dim),
            "o": (num_heads * head_dim, hidden),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
            "lm_head": (hidden, self.vocab_size),
        }


LLAMA_3_8B = Sizes(
    dtype=torch.bfloat16,
    heads=(32, 8, 128),
    hidden_size=4_096,
    intermediate_size=14_336,
    vocab_size=128_256,
    block_size=64,
    decode=((1, 2_048), (1, 8_192), (32, 2_048), (32, 8_192), (256, 2_048), (256, 8_192)),
    prefill=((2_048, 0), (8_192, 0), (32_768, 0), (2_048, 30_720)),
    num_tokens=(32, 256, 2_048, 8_192),
    num_rows=(32, 256),
    product_tokens=(1, 16, 64, 256, 2_048),
    product_side=8_192,
    copy_bytes=1 << 30,
)
TINY = Sizes(
    dtype=torch.float32,
    heads=(4, 2, 16),
    hidden_size=128,
    intermediate_size=256,
    vocab_size=300,
    block_size=16,
    decode=((1, 40), (3, 48)),
    prefill=((48, 0), (8, 24)),
    num_tokens=(5,),
    num_rows=(4,),
    product_tokens=(1, 3),
    product_side=32,
    copy_bytes=1 << 16,
)
