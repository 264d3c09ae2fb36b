"""Attention over a paged cache: decode, prefill, and the verification of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from perf.kernels.attention_rivals import EqualSequences, attention_rivals
from perf.kernels.cases import Case, assert_agrees, num_bytes
from perf.kernels.sizes import Sizes

from naiad_kernels.paged_attention import paged_attention, plan_attention, reference
from naiad_kernels.paged_attention.layout import CacheLayout, fixed_split_for
from naiad_kernels.store_kv import LayerCache
from naiad_kernels.store_kv.quantize import quantize

_NUM_CHECKED_TOKENS = 8
_NUM_DRAFTS = 4
_LARGE_BATCH, _LONG_CONTEXT, _LONG_PROMPT = 32, 2_048, 8_192


def attention_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield one case at a time, because a case's cache may take most of the memory."""
    codes = [None, torch.int8]
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0):
        codes.append(torch.float8_e4m3fn)
    for cache_dtype in codes:
        for num_seqs, seq_len in sizes.decode:
            yield _decode(sizes, device, [seq_len] * num_seqs, cache_dtype)
        for query_len, context in sizes.prefill:
            yield _prefill(sizes, device, query_len, context, cache_dtype)
    # Realistic lengths: most contexts are short, one is long.
    draw = random.Random(0)
    longest = max(seq_len for _, seq_len in sizes.decode)
    yield _decode(sizes, device, [draw.randint(1, longest) for _ in range(32)], None)
    num_seqs, seq_len = sizes.decode[len(sizes.decode) // 2]
    yield _step(sizes, device, "verify", [1 + _NUM_DRAFTS] * num_seqs, [seq_len] * num_seqs)
    yield _step(sizes, device, "decode, fixed order", [1] * num_seqs, [seq_len] * num_seqs, is_fixed=True)


def _decode(sizes: Sizes, device: torch.device, seq_lens: list[int], codes: torch.dtype | None) -> Case:
    target = ""
    if len(seq_lens) >= _LARGE_BATCH and min(seq_lens) >= _LONG_CONTEXT:
        target = "decode of an 8-bit cache" if codes else "decode"
    return _step(sizes, device, "decode", [1] * len(seq_lens), seq_lens, codes, target)


def _prefill(
    sizes: Sizes, device: torch.device, query_len: int, context: int, codes: torch.dtype | None
) -> Case:
    target = "prefill" if codes is None and (query_len, context) == (_LONG_PROMPT, 0) else ""
    return _step(sizes, device, "prefill", [query_len], [query_len + context], codes, target)


def _step(
    sizes: Sizes,
    device: torch.device,
    op: str,
    query_lens: list[int],
    seq_lens: list[int],
    codes: torch.dtype | None = None,
    target: str = "",
    is_fixed: bool = False,
) -> Case:
    num_heads, _, head_dim = sizes.heads
    fixed_split = fixed_split_for(max(seq_lens)) if is_fixed else 0
    layout = CacheLayout(*sizes.heads, sizes.block_size, sizes.dtype, device, fixed_split)
    tables = _scattered_tables([layout.blocks_for(length) for length in seq_lens])
    num_blocks = sum(map(len, tables))
    cache = _random_cache(sizes, device, num_blocks, codes)
    query = torch.randn(sum(query_lens), num_heads, head_dim, device=device).to(sizes.dtype)
    plan = plan_attention(query_lens, seq_lens, tables, layout)
    pairs = sum(q * (n - q / 2) for q, n in zip(query_lens, seq_lens, strict=True))
    token_bytes = sum(num_bytes(part) for part in _parts(cache)) // (num_blocks * sizes.block_size)
    rivals = {}
    are_equal = len(set(seq_lens)) == 1 and seq_lens[0] % sizes.block_size == 0
    if codes is None and are_equal and not is_fixed:
        shaped = query.view(len(seq_lens), query_lens[0], num_heads, head_dim)
        rivals = attention_rivals(EqualSequences(shaped, cache, torch.tensor(tables, device=device)))
    dtype = str(codes or sizes.dtype).removeprefix("torch.")
    return Case(
        op=op,
        shape=f"{_lengths(query_lens, seq_lens)} {dtype}",
        run=lambda: paged_attention(query, cache, plan),
        check=_check(query, cache, query_lens, seq_lens, tables),
        rivals=rivals,
        num_bytes=sum(seq_lens) * token_bytes + 2 * num_bytes(query),
        flops=int(4 * num_heads * head_dim * pairs),
        target=target,
    )


def _lengths(query_lens: Sequence[int], seq_lens: Sequence[int]) -> str:
    context = f"{min(seq_lens)}" if len(set(seq_lens)) == 1 else f"{min(seq_lens)} to {max(seq_lens)}"
    return f"{len(seq_lens)} × {query_lens[0]} of {context}"


def _scattered_tables(counts: Sequence[int]) -> list[list[int]]:
    blocks = list(range(sum(counts)))
    random.Random(0).shuffle(blocks)
    return [[blocks.pop() for _ in range(count)] for count in counts]


def _random_cache(
    sizes: Sizes, device: torch.device, num_blocks: int, codes: torch.dtype | None
) -> LayerCache:
    _, num_kv_heads, head_dim = sizes.heads
    shape = (num_blocks, num_kv_heads, sizes.block_size, head_dim)
    key, value = (torch.randn(shape, device=device, dtype=sizes.dtype) for _ in range(2))
    if codes is None:
        return LayerCache(key, value)
    (key, key_scale), (value, value_scale) = (quantize(part, codes) for part in (key, value))
    return LayerCache(key, value, key_scale, value_scale)


def _parts(cache: LayerCache) -> list[torch.Tensor]:
    parts = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    return [part for part in parts if part is not None]


def _check(
    query: torch.Tensor,
    cache: LayerCache,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
) -> Callable[[torch.Tensor], None]:
    """Make a check of some tokens, each computed by the reference as a step of its own."""
    draw = random.Random(1)
    tokens = [(row, index) for row, length in enumerate(query_lens) for index in range(length)]
    chosen = draw.sample(range(len(tokens)), min(_NUM_CHECKED_TOKENS, len(tokens)))

    def check(actual: torch.Tensor) -> None:
        for token in chosen:
            row, index = tokens[token]
            seq_len = seq_lens[row] - query_lens[row] + index + 1
            one = query[token : token + 1]
            expected = reference.paged_attention(one, cache, [1], [seq_len], [tables[row]])
            assert_agrees("attention", actual[token : token + 1], expected)

    return check
