"""Tile sizes of the attention kernels: fixed, because tuning while serving would stall requests.

Every row keeps its registers unspilled and its shared memory within what sm_80 has; the compile
gate checks both.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

_MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program is cut: query rows and keys of a tile, warps, and tiles in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def short_tile(element_bytes: int, tile_dim: int, num_rows: int) -> Tile:
    """For a program with all `num_rows` query rows (tokens × heads of a KV head) of a sequence."""
    rows = max(_MIN_ROWS, triton.next_power_of_2(num_rows))
    if element_bytes > 2:
        return Tile(rows, 32, 4, 2)
    if tile_dim > 128:
        return Tile(rows, 32, 4, 3)
    return Tile(rows, 64, 4, 3)


def long_tile(element_bytes: int, tile_dim: int, group_size: int) -> Tile:
    """For programs that share a sequence's query rows among them."""
    fewest = max(_MIN_ROWS, triton.next_power_of_2(group_size))
    if element_bytes > 2:
        return Tile(max(32, fewest), 32, 4, 2)
    if tile_dim > 128:
        return Tile(max(64, fewest), 32, 8, 2)
    return Tile(max(128, fewest), 64, 8, 3)
