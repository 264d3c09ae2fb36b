"""Tile sizes of the attention kernels; fixed, because tuning while serving would stall requests.

They were chosen from compiled code: the largest that spill no registers on the shapes of the compile gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

_MIN_ROWS = 16
_HOPPER = 90
_ALL_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and keys of a program's tile, its number of warps, and the number of tiles in flight.

    `max_registers` limits a thread's registers; set where ptxas would otherwise spill to fit more programs.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def short_tile(element_bytes: int, tile_dim: int, num_rows: int, is_quantized: bool) -> Tile:
    """The tile of a program that computes all query rows (tokens × heads of a KV head) of a sequence.

    Codes are converted to the query's dtype in registers, so quantized tiles are smaller.
    """
    rows = max(_MIN_ROWS, triton.next_power_of_2(num_rows))
    is_wide = tile_dim > 128
    if element_bytes > 2:
        return Tile(rows, 16 if is_quantized or is_wide else 32, 8, 2, _ALL_REGISTERS)
    if rows > 64 or (is_wide and rows > 32):
        return Tile(rows, 32, 8, 2)
    if is_quantized:
        num_warps = 4 if rows == _MIN_ROWS else 8
        return Tile(rows, 32, num_warps, 3, _ALL_REGISTERS if is_wide else None)
    return Tile(rows, 32 if is_wide or rows > 32 else 64, 4, 3)


def long_tile(
    element_bytes: int, tile_dim: int, group_size: int, is_quantized: bool, capability: int
) -> Tile:
    """The tile of programs that share a sequence's query rows; `capability` is 90 for sm_90."""
    fewest = max(_MIN_ROWS, triton.next_power_of_2(group_size))
    is_wide = tile_dim > 128
    if element_bytes > 2:
        return Tile(fewest, 16 if is_quantized or is_wide else 32, 8, 2, _ALL_REGISTERS)
    if is_wide:
        return Tile(max(64, fewest), 32, 8, 2)
    if capability >= _HOPPER:
        return Tile(max(128, fewest), 64, 8, 3)
    return Tile(max(64 if is_quantized else 128, fewest), 32, 8, 3)
