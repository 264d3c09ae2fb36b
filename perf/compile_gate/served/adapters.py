"""The launches of low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from perf.compile_gate.served.shapes import NUM_TOKENS, ServedShape

from naiad_kernels.lora import kernel as lora_kernel
from naiad_kernels.lora import plan_lora


def adapters(shape: ServedShape) -> Callable[[], object]:
    """Adapters of queries, keys and values, of several ranks."""
    plan = plan_lora(torch.zeros(NUM_TOKENS, dtype=torch.int64), 2)
    sizes = tuple(n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    hidden = torch.empty(NUM_TOKENS, shape.hidden_size, dtype=shape.dtype)
    out = torch.empty(NUM_TOKENS, sum(sizes), dtype=shape.dtype)

    def launch() -> None:
        for rank in (16, 64, 128):
            down = torch.empty(2, 3, rank, shape.hidden_size, dtype=shape.dtype)
            up = torch.empty(2, sum(sizes), rank, dtype=shape.dtype)
            shrunk = lora_kernel.lora_shrink(hidden, down, plan)
            lora_kernel.lora_expand(out, shrunk, up, sizes, plan)

    return launch
