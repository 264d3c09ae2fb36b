"""Shared by the tests on a GPU: its dtypes, and cases moved to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers.attention_cases import AttentionCase
from naiad_kernels.paged_attention import AttentionPlan, plan_attention
from naiad_kernels.store_kv import LayerCache

GPU = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
needs_float8 = pytest.mark.skipif(not HAS_FLOAT8, reason="float8_e4m3fn needs sm_90")
CODES = [torch.int8, pytest.param(torch.float8_e4m3fn, marks=needs_float8)]


def to_gpu(cache: LayerCache) -> LayerCache:
    """The same cache on the GPU."""
    parts = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    return LayerCache(*(None if part is None else part.to(GPU) for part in parts))


def plan_on_gpu(case: AttentionCase, fixed_split: int = 0) -> AttentionPlan:
    """The plan of the case's step for the GPU."""
    layout = replace(case.layout, device=GPU, fixed_split=fixed_split)
    return plan_attention(case.query_lens, case.seq_lens, case.tables, layout)


def captured(compute: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that repeats the computation, and the tensor with its result."""
    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return graph, out
