"""Maps of blocks by state, for pools of all sizes."""

from __future__ import annotations

import random

import pytest

from helpers.snapshots import check_map
from naiad.kv_cache.block_map import block_map
from naiad.snapshot import CACHED, FREE, MAX_CELLS, SHARED, USED


@pytest.mark.parametrize(
    "num_blocks", [1, 7, MAX_CELLS, MAX_CELLS + 1, 2 * MAX_CELLS, 3 * MAX_CELLS - 1, 50_000]
)
@pytest.mark.parametrize("most", [1, 2, 300])
def test_states_of_random_pools(num_blocks: int, most: int) -> None:
    rng = random.Random(num_blocks + most)
    ref_counts = [rng.choice((0, 0, 1, rng.randint(0, most))) for _ in range(num_blocks)]
    cached = set(rng.sample(range(num_blocks), num_blocks // 2))
    expected = [
        (CACHED if block_id in cached else FREE) if count == 0 else USED if count == 1 else SHARED
        for block_id, count in enumerate(ref_counts)
    ]
    check_map(block_map(ref_counts, cached, None), expected)
