"""The launches of a batch-invariant step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from perf.compile_gate.served.layer import attention_launch
from perf.compile_gate.served.shapes import NUM_TOKENS, ServedShape

from naiad_kernels.linear.fixed_order import kernel as fixed_order_kernel
from naiad_kernels.paged_attention.layout import fixed_split_for

# Short and long maximum lengths: contexts are split into parts of different sizes.
_MODEL_LENS = (8_192, 131_072)


def fixed_order(shape: ServedShape) -> Callable[[], object]:
    """Every product of the model, the first with a bias, and attention."""
    query_size = shape.num_heads * shape.head_dim
    qkv_size = query_size + 2 * shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = [(hidden, qkv_size), (query_size, hidden), (hidden, 2 * inner), (inner, hidden)]
    sizes.append((hidden, shape.vocab_size))
    bias = torch.empty(qkv_size, dtype=shape.dtype)
    steps = [
        attention_launch(shape, [1], [1_000], fixed_split=fixed_split_for(length)) for length in _MODEL_LENS
    ]

    def launch() -> None:
        for num_in, num_out in sizes:
            x = torch.empty(NUM_TOKENS, num_in, dtype=shape.dtype)
            matrix = torch.empty(num_out, num_in, dtype=shape.dtype)
            fixed_order_kernel.linear(x, matrix, bias if num_out == qkv_size else None)
        for step in steps:
            step()

    return launch
