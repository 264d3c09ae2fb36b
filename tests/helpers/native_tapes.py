"""Single records of the native kernels, and the cache as they read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from naiad_kernels.native.kv_layout import native_keys, native_values
from naiad_kernels.native.library import Team
from naiad_kernels.native.recorder import TapeRecorder, TracedRows
from naiad_kernels.native.tables import NativeTables
from naiad_kernels.native.tape import Tape
from naiad_kernels.store_kv import LayerCache


def run_records(
    team: Team,
    write: Callable[..., TracedRows],
    *inputs: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    **step: Any,
) -> torch.Tensor:
    """What records make of the inputs `[num_tokens, width]`; `write` calls public ops with stand-ins."""
    recorder = TapeRecorder(dtype)
    rows = [recorder.rows(each.shape[1]) for each in inputs]
    tape = Tape(recorder.finish(write(recorder, *rows)), team)
    num_tokens = len(inputs[0]) if inputs else len(step["token_ids"])
    return tape.run(num_tokens, inputs=inputs, **step).clone()


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows as products with eight or four bits take them: the largest of each 64 inputs is ±127 steps."""
    width = x.shape[1]
    groups = torch.nn.functional.pad(x, (0, -width % 64)).unflatten(1, (-1, 64))
    top = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / top)).round() * (top / 127)).nan_to_num(0).flatten(1)[:, :width]


def native_cache(cache: LayerCache, dtype: torch.dtype | None = None) -> LayerCache:
    """The same keys and values, laid out for native kernels; `dtype`: as which codes are multiplied."""
    keys, values = torch.empty_like(cache.key), torch.empty_like(cache.value)
    laid_out = native_keys(keys, dtype)
    together = laid_out.shape[-1]
    by_token = cache.key.unflatten(2, (-1, 16)).unflatten(-1, (-1, together))
    laid_out.copy_(by_token.permute(0, 1, 2, 4, 3, 5))
    native_values(values, dtype).copy_(cache.value.unflatten(2, (-1, together)).transpose(-1, -2))
    return LayerCache(keys, values, cache.key_scale, cache.value_scale)


def torch_keys(keys: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The keys of a native cache as torch's cache has them."""
    return native_keys(keys, dtype).permute(0, 1, 2, 4, 3, 5).flatten(-2).flatten(2, 3)


def torch_values(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of a native cache as torch's cache has them."""
    return native_values(values, dtype).transpose(-1, -2).flatten(2, 3)


def positions_of(query_lens: Sequence[int], seq_lens: Sequence[int]) -> torch.Tensor:
    """Return each token's position, sequences one after the other."""
    pairs = zip(query_lens, seq_lens, strict=True)
    return torch.tensor([place for query, end in pairs for place in range(end - query, end)])


def tables_of(query_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> list[NativeTables]:
    """Return the block tables of a step whose layers form one group."""
    return [NativeTables.of(query_lens, block_tables)]
