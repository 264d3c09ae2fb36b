"""A recorded trace through the KV cache manager alone, compared with a direct computation of its hits."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest

from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.sequence import SamplingParams, Sequence

TRACE = Path(__file__).parents[2] / "perf" / "data" / "mooncake_fast25_synthetic.jsonl"


def read_trace() -> list[list[int]]:
    """The prompts, each as the ids of its blocks."""
    return [json.loads(line)["hash_ids"] for line in TRACE.read_text().splitlines()]


def straight_hits(prompts: list[list[int]], num_blocks: int) -> int:
    """Hits in a least-recently-used list of block ids; a prompt's end is older than its beginning."""
    cache: OrderedDict[int, None] = OrderedDict()
    total = 0
    for ids in prompts:
        num_hits = 0
        while num_hits < len(ids) and ids[num_hits] in cache:
            num_hits += 1
        total += num_hits
        for block in ids[:num_hits]:
            del cache[block]
        # One more block holds the token whose logits are computed.
        while len(cache) + len(ids) + 1 > num_blocks:
            cache.popitem(last=False)
        for block in reversed(ids):
            cache[block] = None
    return total


def managed_hits(prompts: list[list[int]], num_blocks: int) -> int:
    """The hits of the KV cache manager; each token represents a block of the trace."""
    manager = KVCacheManager(num_blocks, 1, PrefixCache(1))
    for number, ids in enumerate(prompts):
        token_ids = [*ids, 2**31 + number]
        sequence = Sequence(number, token_ids, len(token_ids), SamplingParams(max_tokens=1), 0.0)
        assert manager.admit(sequence) is not None
        manager.publish(sequence, len(ids))
        manager.free(sequence)
    return manager.num_hit_tokens


@pytest.mark.parametrize("num_blocks", [400, 2_000, 10_000, 200_000])
def test_hits_are_those_of_a_straight_computation(num_blocks: int) -> None:
    prompts = read_trace()
    hits = straight_hits(prompts, num_blocks)
    assert hits > 0
    assert managed_hits(prompts, num_blocks) == hits
